//! The same timeline by value head: when a head's scan ended, its state left, arrived elsewhere, and corrected outputs.
//!
//! Times of different PEs are compared here, so their clocks matter. PEs on the CPU stamp one clock of the machine. GPUs stamp
//! `%globaltimer`, which the driver keeps in step for the GPUs of a machine to about a microsecond and which may advance in
//! steps as long. Nothing is subtracted from the stamps; instead the messages themselves are asked ([`Heads::soonest_ns`]).

use std::collections::BTreeMap;

use serde::Serialize;

use super::{Event, Kind, Trace};

/// What happened to one value head on one PE, in nanoseconds; absent is what did not happen there.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct HeadTimes {
    /// PE.
    pub pe: u32,
    /// Value head.
    pub head: u32,
    /// End of the last scan of its columns, forward or backward.
    pub scan_end_ns: Option<u64>,
    /// Begin of the first message with its state.
    pub put_begin_ns: Option<u64>,
    /// When the last message with its state had been issued.
    pub put_end_ns: Option<u64>,
    /// When the first signal of its state had been seen.
    pub first_seen_ns: Option<u64>,
    /// When the last signal of its state had been seen.
    pub seen_ns: Option<u64>,
    /// When what the state contributes had been added to the last of its outputs, or gradients.
    pub corrected_ns: Option<u64>,
}

/// All heads of a trace of one step, and what they say about overlap.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Heads {
    /// By PE and head.
    pub times: Vec<HeadTimes>,
    /// Heads, counted on each PE that sends them, all of which had been sent before the same PE's last scan ended.
    pub sent_while_scanning: usize,
    /// Heads, counted on each PE that sends them.
    pub sent: usize,
    /// Least time from the begin of a head's first message to its first signal seen by another PE, in nanoseconds. Messages do
    /// not arrive before they leave: if this is negative the PEs' clocks are apart by at least as much, and so is every
    /// comparison of times of different PEs. None without messages.
    pub soonest_ns: Option<i64>,
}

/// Steps after which the outputs of a head are complete.
const CORRECTIONS: [&str; 2] = ["fix_out", "grad"];
/// Sums over heads, which belong to none.
const SUMS: &str = "reduce";

/// The head that `event` is about.
fn head_of(event: &Event) -> Option<u32> {
    event.args.head.filter(|_| event.name != SUMS)
}

impl Heads {
    /// The heads of `trace`, which should hold one step: of several, the first begins and last ends count.
    pub fn of(trace: &Trace) -> Self {
        let mut times: BTreeMap<(u32, u32), HeadTimes> = BTreeMap::new();
        for (event, head) in trace.events.iter().filter_map(|event| Some((event, head_of(event)?))) {
            let entry = times.entry((event.pe, head)).or_default();
            (entry.pe, entry.head) = (event.pe, head);
            entry.add(event);
        }
        let times: Vec<HeadTimes> = times.into_values().collect();
        let last_scan = |pe: u32| times.iter().filter(|head| head.pe == pe).filter_map(|head| head.scan_end_ns).max();
        let sent = times.iter().filter_map(|head| Some((head.put_end_ns?, last_scan(head.pe)?)));
        let (sent_while_scanning, sent) =
            sent.fold((0, 0), |(early, all), (put, scan)| (early + usize::from(put <= scan), all + 1));
        Self { soonest_ns: soonest(&times), sent_while_scanning, sent, times }
    }
}

impl HeadTimes {
    fn add(&mut self, event: &Event) {
        let first = |at: &mut Option<u64>, ns: u64| *at = Some(at.map_or(ns, |at| at.min(ns)));
        let last = |at: &mut Option<u64>, ns: u64| *at = Some(at.map_or(ns, |at| at.max(ns)));
        match (event.kind, &*event.name) {
            (Kind::Put, _) => {
                first(&mut self.put_begin_ns, event.start_ns);
                last(&mut self.put_end_ns, event.end_ns);
            }
            // Waits for a free slot are not waits for a state.
            (Kind::Wait, "wait") => {
                first(&mut self.first_seen_ns, event.end_ns);
                last(&mut self.seen_ns, event.end_ns);
            }
            (Kind::Compute, "scan" | "scan_back") => last(&mut self.scan_end_ns, event.end_ns),
            (Kind::Compute, name) if CORRECTIONS.contains(&name) => last(&mut self.corrected_ns, event.end_ns),
            _ => {}
        }
    }
}

fn soonest(times: &[HeadTimes]) -> Option<i64> {
    let arrival = |at: &HeadTimes| {
        let elsewhere = times.iter().filter(|from| from.head == at.head && from.pe != at.pe);
        let left = elsewhere.filter_map(|from| from.put_begin_ns).min()?;
        Some(at.first_seen_ns? as i64 - left as i64)
    };
    times.iter().filter_map(arrival).min()
}

/// `trace` with a track for each value head in place of each block or worker; what belongs to no head is left out.
pub fn by_head(trace: &Trace) -> Trace {
    let mut heads = Trace::new(trace.title.clone(), "head");
    let of_head = |event: &Event| head_of(event).map(|head| Event { track: head, ..event.clone() });
    heads.events = trace.events.iter().filter_map(of_head).collect();
    heads
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::super::tests::event;
    use super::super::{Args, Size, svg};
    use super::*;

    fn of_head(head: u32, event: Event) -> Event {
        Event { args: Args { head: Some(head), ..Args::default() }, ..event }
    }

    /// Two PEs, two heads: head 0 leaves while head 1 is scanned, and PE 1 sees it before it needs it.
    fn example() -> Trace {
        let mut trace = Trace::new("kda forward", "block");
        trace.events = vec![
            of_head(0, event(0, 0, "reduce", 0, 2)),
            of_head(0, event(0, 0, "prep", 0, 10)),
            of_head(0, event(0, 0, "scan", 10, 50)),
            of_head(0, event(0, 1, "scan", 10, 55)),
            of_head(0, event(0, 0, "put", 50, 60)),
            of_head(0, event(0, 1, "put", 55, 70)),
            of_head(1, event(0, 0, "scan", 60, 100)),
            of_head(1, event(0, 0, "put", 100, 120)),
            of_head(0, event(1, 0, "scan", 10, 52)),
            of_head(1, event(1, 0, "scan", 52, 98)),
            of_head(0, event(1, 0, "wait", 98, 99)),
            of_head(0, event(1, 0, "fix_out", 99, 110)),
            of_head(1, event(1, 0, "wait", 110, 125)),
            of_head(1, event(1, 0, "slot_wait", 125, 199)),
            of_head(1, event(1, 0, "fix_out", 126, 140)),
        ];
        trace
    }

    #[test]
    fn each_head_has_its_way_from_scan_to_correction() {
        let heads = Heads::of(&example());
        let sender = |head, scan, begin, end| HeadTimes {
            head,
            scan_end_ns: Some(scan),
            put_begin_ns: Some(begin),
            put_end_ns: Some(end),
            ..HeadTimes::default()
        };
        let receiver = |head, scan, seen, corrected| HeadTimes {
            pe: 1,
            head,
            scan_end_ns: Some(scan),
            first_seen_ns: Some(seen),
            seen_ns: Some(seen),
            corrected_ns: Some(corrected),
            ..HeadTimes::default()
        };
        let want =
            [sender(0, 55, 50, 70), sender(1, 100, 100, 120), receiver(0, 52, 99, 110), receiver(1, 98, 125, 140)];
        assert_eq!(heads.times, want);
        // Head 0 had left at 70, the last scan ended at 100.
        assert_eq!((heads.sent_while_scanning, heads.sent), (1, 2));
        // Head 1 was seen 25 after it began to leave, head 0 49 after.
        assert_eq!(heads.soonest_ns, Some(25));
    }

    #[test]
    fn clocks_that_are_apart_show_as_messages_from_the_future() {
        let mut trace = example();
        for event in trace.events.iter_mut().filter(|event| event.pe == 0) {
            (event.start_ns, event.end_ns) = (event.start_ns + 60, event.end_ns + 60);
        }
        assert_eq!(Heads::of(&trace).soonest_ns, Some(-35));
        assert_eq!(Heads::of(&Trace::new("", "")).soonest_ns, None);
    }

    #[test]
    fn a_row_per_head_holds_what_all_blocks_did_for_it() {
        let heads = by_head(&example());
        assert_eq!(heads.track_name, "head");
        let tracks: BTreeSet<_> = heads.events.iter().map(|event| (event.pe, event.track)).collect();
        assert_eq!(tracks, BTreeSet::from([(0, 0), (0, 1), (1, 0), (1, 1)]));
        assert!(heads.events.iter().all(|event| event.name != SUMS), "a sum belongs to no head");
        assert!(svg(&heads, Size::default()).unwrap().contains("head 0"));
    }
}
