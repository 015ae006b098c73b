//! Overlap figures of a trace.

use std::collections::{BTreeMap, BTreeSet};

use serde::Serialize;

use super::{Event, Kind, Trace};

/// Overlap figures of all PEs of a trace; times in nanoseconds.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Figures {
    /// From the first start to the last end on any PE.
    pub span_ns: u64,
    /// Figures of each PE, in the order of their numbers.
    pub pes: Vec<PeFigures>,
}

/// Overlap figures of one PE. Times are measures of sets of instants: what two tracks do at once counts once.
///
/// A wait or put inside a compute event of the same track interrupts it, so it does not hide itself.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct PeFigures {
    /// PE.
    pub pe: u32,
    /// Time in which at least one track computes.
    pub busy_ns: u64,
    /// Time in which at least one track waits.
    pub wait_ns: u64,
    /// Time in which at least one track waits and none computes.
    pub exposed_wait_ns: u64,
    /// Time in which at least one track puts.
    pub put_ns: u64,
    /// Time in which at least one track puts and none computes.
    pub exposed_put_ns: u64,
    /// Bytes of all puts.
    pub bytes_put: u64,
}

impl PeFigures {
    /// Share of the put time that compute hides, 0 to 1; `None` if nothing was put.
    pub fn put_hidden(&self) -> Option<f64> {
        hidden(self.put_ns, self.exposed_put_ns)
    }

    /// Share of the wait time that compute hides, 0 to 1; `None` if nothing waited.
    pub fn wait_hidden(&self) -> Option<f64> {
        hidden(self.wait_ns, self.exposed_wait_ns)
    }
}

fn hidden(total: u64, exposed: u64) -> Option<f64> {
    (total > 0).then(|| (total - exposed) as f64 / total as f64)
}

impl Figures {
    /// The figures of `trace`.
    pub fn of(trace: &Trace) -> Self {
        let pes: BTreeSet<_> = trace.events.iter().map(|e| e.pe).collect();
        let of_pe = |pe| pe_figures(pe, trace.events.iter().filter(|e| e.pe == pe));
        Self {
            span_ns: trace.span_ns().map_or(0, |(start, end)| end - start),
            pes: pes.into_iter().map(of_pe).collect(),
        }
    }
}

fn pe_figures<'a>(pe: u32, events: impl Iterator<Item = &'a Event>) -> PeFigures {
    let mut bytes_put = 0;
    let mut tracks: BTreeMap<u32, [Vec<Interval>; 3]> = BTreeMap::new();
    for event in events {
        tracks.entry(event.track).or_default()[event.kind as usize].push((event.start_ns, event.end_ns));
        if event.kind == Kind::Put {
            bytes_put += event.args.bytes.unwrap_or(0);
        }
    }
    let (mut computes, mut waits, mut puts) = (Vec::new(), Vec::new(), Vec::new());
    for [compute, put, wait] in tracks.into_values() {
        let interrupted = Instants::new(put.iter().chain(&wait).copied().collect());
        computes.extend(Instants::new(compute).minus(&interrupted).0);
        puts.extend(put);
        waits.extend(wait);
    }
    let [compute, wait, put] = [computes, waits, puts].map(Instants::new);
    PeFigures {
        pe,
        busy_ns: compute.measure(),
        wait_ns: wait.measure(),
        exposed_wait_ns: wait.minus(&compute).measure(),
        put_ns: put.measure(),
        exposed_put_ns: put.minus(&compute).measure(),
        bytes_put,
    }
}

/// Start, and end not included.
type Interval = (u64, u64);

/// A set of instants: disjoint intervals in order of time.
struct Instants(Vec<Interval>);

impl Instants {
    /// The union of `intervals`.
    fn new(mut intervals: Vec<Interval>) -> Self {
        intervals.sort_unstable();
        let mut union: Vec<Interval> = Vec::new();
        for (start, end) in intervals.into_iter().filter(|(start, end)| start < end) {
            match union.last_mut() {
                Some(last) if start <= last.1 => last.1 = last.1.max(end),
                _ => union.push((start, end)),
            }
        }
        Self(union)
    }

    fn measure(&self) -> u64 {
        self.0.iter().map(|(start, end)| end - start).sum()
    }

    /// The instants of this set that are not in `other`.
    fn minus(&self, other: &Self) -> Self {
        let mut rest = Vec::new();
        let mut holes = other.0.iter().copied().peekable();
        for &(mut start, end) in &self.0 {
            while let Some(&(hole_start, hole_end)) = holes.peek() {
                if hole_start >= end {
                    break;
                }
                if start < hole_start {
                    rest.push((start, hole_start));
                }
                start = start.max(hole_end);
                if hole_end > end {
                    // It reaches into the next interval.
                    break;
                }
                holes.next();
            }
            if start < end {
                rest.push((start, end));
            }
        }
        Self(rest)
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::event;
    use super::super::{Args, Event};
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn overlap_of_a_trace_made_by_hand() {
        let put = |pe, track, start, end, bytes| Event {
            args: Args { bytes: Some(bytes), ..Args::default() },
            ..event(pe, track, "put", start, end)
        };
        let mut trace = Trace::new("", "worker");
        trace.events = vec![
            // PE 0: the put of 100..130 is hidden until the scan of track 1 ends at 120.
            event(0, 0, "scan", 0, 100),
            event(0, 1, "scan", 20, 120),
            put(0, 0, 100, 130, 1000),
            put(0, 1, 120, 125, 24),
            // PE 1: waits 50..90 and 60..110; computes 0..50, 80..85 and from 110.
            event(1, 0, "scan", 0, 50),
            event(1, 0, "wait", 50, 90),
            event(1, 1, "wait", 60, 110),
            event(1, 2, "prep", 80, 85),
            event(1, 0, "fix_out", 110, 150),
        ];
        let figures = Figures::of(&trace);
        assert_eq!(figures.span_ns, 150);
        let [pe0, pe1] = &figures.pes[..] else { panic!("{figures:?}") };
        let want = PeFigures {
            pe: 0,
            busy_ns: 120,
            wait_ns: 0,
            exposed_wait_ns: 0,
            put_ns: 30,
            exposed_put_ns: 10,
            bytes_put: 1024,
        };
        assert_eq!(*pe0, want);
        assert_eq!((pe0.put_hidden(), pe0.wait_hidden()), (Some(2.0 / 3.0), None));
        let want = PeFigures {
            pe: 1,
            busy_ns: 95,
            wait_ns: 60,
            exposed_wait_ns: 55,
            put_ns: 0,
            exposed_put_ns: 0,
            bytes_put: 0,
        };
        assert_eq!(*pe1, want);
    }

    #[test]
    fn a_wait_inside_a_kernel_does_not_hide_itself() {
        let mut trace = Trace::new("", "block");
        trace.events = vec![event(0, 0, "fix_out", 0, 100), event(0, 0, "wait", 10, 60), event(0, 1, "fix_out", 0, 20)];
        let pe = &Figures::of(&trace).pes[0];
        assert_eq!((pe.busy_ns, pe.wait_ns, pe.exposed_wait_ns), (60, 50, 40));
    }

    #[test]
    fn no_events_no_figures() {
        assert_eq!(Figures::of(&Trace::new("", "")), Figures { span_ns: 0, pes: vec![] });
    }

    proptest! {
        #[test]
        fn set_arithmetic_agrees_with_counting(
            a in prop::collection::vec((0u64..40, 0u64..12), 0..8),
            b in prop::collection::vec((0u64..40, 0u64..12), 0..8),
        ) {
            let intervals = |x: &[(u64, u64)]| x.iter().map(|&(s, n)| (s, s + n)).collect::<Vec<_>>();
            let has = |x: &[(u64, u64)], t: u64| x.iter().any(|&(s, n)| (s..s + n).contains(&t));
            let (sa, sb) = (Instants::new(intervals(&a)), Instants::new(intervals(&b)));
            prop_assert_eq!(sa.measure(), (0..60).filter(|&t| has(&a, t)).count() as u64);
            let rest = (0..60).filter(|&t| has(&a, t) && !has(&b, t)).count() as u64;
            prop_assert_eq!(sa.minus(&sb).measure(), rest);
        }
    }
}
