//! A trace as a drawing: a band per PE, a row per track, a colour per step.

use std::cmp::Reverse;
use std::collections::BTreeMap;

use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, Pos, VPos};

use super::{Event, Figures, Kind, Trace, TraceError};

/// Size of a drawing in pixels.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Size {
    /// Width; below 480 it counts as 480.
    pub width: u32,
    /// Height to fill; few tracks use less, many use more.
    pub height: u32,
}

impl Default for Size {
    fn default() -> Self {
        Self { width: 1000, height: 500 }
    }
}

/// Rows drawn of one PE; more would be too thin to see.
const MAX_TRACKS: usize = 16;
const MIN_WIDTH: i32 = 480;
/// Room for the number of a PE; the longest name of a track comes on top.
const PE_LABEL: i32 = 62;
const RIGHT: i32 = 136;
const BOTTOM: i32 = 46;
const TITLE: i32 = 36;
const LEGEND_ROW: i32 = 20;
const BAND_GAP: i32 = 8;
/// Least and largest height of a track, and least height of a PE's band, into which its label must fit.
const ROW: (i32, i32) = (6, 26);
const MIN_BAND: i32 = 18;
/// Width up to which an event is drawn without a gap to the next.
const THIN: i32 = 3;
/// The back end writes it about a fifth smaller.
const FONT: i32 = 14;
/// Width of a letter of the font, generously, since the reader's font is unknown.
const LETTER: i32 = 7;

const INK: RGBColor = RGBColor(0x33, 0x33, 0x33);
const GRID: RGBColor = RGBColor(0xd8, 0xd8, 0xd8);
const BAND: RGBColor = RGBColor(0xf5, 0xf5, 0xf5);

/// Colours that readers with colour blindness tell apart: blues and greens compute, yellow puts, red waits.
fn palette(kind: Kind) -> &'static [RGBColor] {
    match kind {
        Kind::Compute => &[
            RGBColor(0x00, 0x72, 0xb2),
            RGBColor(0x56, 0xb4, 0xe9),
            RGBColor(0x00, 0x9e, 0x73),
            RGBColor(0xcc, 0x79, 0xa7),
            RGBColor(0x8c, 0x8c, 0x8c),
            RGBColor(0x6a, 0x51, 0xa3),
            RGBColor(0x99, 0x99, 0x33),
            RGBColor(0x44, 0x44, 0x66),
        ],
        Kind::Put => &[RGBColor(0xe6, 0x9f, 0x00), RGBColor(0xf0, 0xe4, 0x42)],
        Kind::Wait => &[RGBColor(0xd5, 0x5e, 0x00), RGBColor(0xf4, 0xa5, 0x82)],
    }
}

/// Draws `trace`: time to the right, a band per PE with a row per track (the first 16), and beside each band the time in
/// which the PE waited and did not compute.
///
/// # Errors
/// [`TraceError::Draw`] without events, or if the drawing back end fails.
pub fn svg(trace: &Trace, size: Size) -> Result<String, TraceError> {
    let span = trace.span_ns().ok_or_else(|| TraceError::Draw { why: "the trace has no events".into() })?;
    let legend = Legend::of(trace);
    let width = i32::try_from(size.width).unwrap_or(i32::MAX).max(MIN_WIDTH);
    let last_track = trace.events.iter().map(|e| e.track).max().unwrap_or(0);
    let left = (PE_LABEL + text_width(&format!("{} {last_track}", trace.track_name))).min(width / 3);
    let right = width - RIGHT;
    let top = TITLE + legend.rows(right - left) * LEGEND_ROW + 8;
    let (bands, bottom) = bands(trace, top, i32::try_from(size.height).unwrap_or(i32::MAX) - BOTTOM);
    let axis = Axis { start: span.0, end: span.1.max(span.0 + 1), left, right };

    let mut out = String::new();
    {
        let root = SVGBackend::with_string(&mut out, (width as u32, (bottom + BOTTOM) as u32)).into_drawing_area();
        let page = Page { root: &root, axis, top, bottom };
        page.all(trace, &legend, &bands).and_then(|()| root.present().map_err(draw_error))?;
    }
    Ok(out)
}

fn draw_error(e: impl std::fmt::Display) -> TraceError {
    TraceError::Draw { why: e.to_string() }
}

/// Colour of each step, by kind and first appearance.
struct Legend<'a>(Vec<(&'a str, Kind, RGBColor)>);

impl<'a> Legend<'a> {
    fn of(trace: &'a Trace) -> Self {
        let mut first: BTreeMap<(Kind, &str), u64> = BTreeMap::new();
        for event in &trace.events {
            let at = first.entry((event.kind, &event.name)).or_insert(event.start_ns);
            *at = event.start_ns.min(*at);
        }
        let mut steps: Vec<_> = first.into_iter().map(|((kind, name), at)| (kind, at, name)).collect();
        steps.sort_unstable();
        let mut used = [0; 3];
        let with_colour = |(kind, _, name)| {
            let colours = palette(kind);
            let next: &mut usize = &mut used[kind as usize];
            *next += 1;
            (name, kind, colours[(*next - 1) % colours.len()])
        };
        Self(steps.into_iter().map(with_colour).collect())
    }

    fn colour(&self, event: &Event) -> RGBColor {
        self.0.iter().find(|(name, kind, _)| *name == event.name && *kind == event.kind).map_or(INK, |entry| entry.2)
    }

    /// Row and distance from the left of each entry, in a space `width` pixels wide.
    fn places(&self, width: i32) -> Vec<(i32, i32)> {
        let (mut row, mut x) = (0, 0);
        let place = |(name, _, _): &(&str, Kind, RGBColor)| {
            let needs = 16 + text_width(name) + 18;
            if x > 0 && x + needs > width {
                (row, x) = (row + 1, 0);
            }
            x += needs;
            (row, x - needs)
        };
        self.0.iter().map(place).collect()
    }

    fn rows(&self, width: i32) -> i32 {
        self.places(width).last().map_or(0, |(row, _)| row + 1)
    }
}

fn text_width(text: &str) -> i32 {
    text.chars().count() as i32 * LETTER
}

/// Where one PE is drawn.
struct Band {
    pe: u32,
    /// All tracks of the PE, of which the first [`MAX_TRACKS`] have a row.
    tracks: Vec<u32>,
    top: i32,
    row: i32,
    height: i32,
}

impl Band {
    fn shown(&self) -> usize {
        self.tracks.len().min(MAX_TRACKS)
    }

    /// Top and bottom of a track's row, if it has one.
    fn row_of(&self, track: u32) -> Option<(i32, i32)> {
        let index = self.tracks.binary_search(&track).ok().filter(|&i| i < MAX_TRACKS)?;
        let pad = (self.height - self.shown() as i32 * self.row) / 2;
        let top = self.top + pad + index as i32 * self.row;
        Some((top, top + self.row))
    }
}

/// A band for each PE from `top` down to `bottom`, or further down if rows would become too thin; and where they end.
fn bands(trace: &Trace, top: i32, bottom: i32) -> (Vec<Band>, i32) {
    let mut tracks: BTreeMap<u32, Vec<u32>> = BTreeMap::new();
    for event in &trace.events {
        tracks.entry(event.pe).or_default().push(event.track);
    }
    for of_pe in tracks.values_mut() {
        of_pe.sort_unstable();
        of_pe.dedup();
    }
    let rows: i32 = tracks.values().map(|t| t.len().min(MAX_TRACKS) as i32).sum();
    let row = ((bottom - top - tracks.len() as i32 * BAND_GAP) / rows.max(1)).clamp(ROW.0, ROW.1);
    let mut y = top;
    let band = |(pe, tracks): (u32, Vec<u32>)| {
        let height = (tracks.len().min(MAX_TRACKS) as i32 * row).max(MIN_BAND);
        let band = Band { pe, tracks, top: y, row, height };
        y += height + BAND_GAP;
        band
    };
    let bands = tracks.into_iter().map(band).collect();
    (bands, y)
}

/// Time to pixels.
#[derive(Clone, Copy)]
struct Axis {
    start: u64,
    end: u64,
    left: i32,
    right: i32,
}

impl Axis {
    fn ns_per_pixel(&self) -> f64 {
        (self.end - self.start) as f64 / f64::from(self.right - self.left)
    }

    fn x(&self, ns: u64) -> i32 {
        self.left + ((ns - self.start) as f64 / self.ns_per_pixel()).round() as i32
    }

    /// Distance of the marks in nanoseconds, 1, 2 or 5 times a power of ten, so that labels have room.
    fn step(&self) -> u64 {
        let least = self.ns_per_pixel() * 80.0;
        let scales = std::iter::successors(Some(1u64), |s| s.checked_mul(10));
        scales.flat_map(|s| [s, 2 * s, 5 * s]).find(|&s| s as f64 >= least).unwrap_or(u64::MAX)
    }
}

/// Unit of the axis: its name, and nanoseconds in it.
fn unit(span_ns: u64) -> (&'static str, f64) {
    match span_ns {
        0..10_000_000 => ("us", 1e3),
        10_000_000..10_000_000_000 => ("ms", 1e6),
        _ => ("s", 1e9),
    }
}

struct Page<'a, 'b> {
    root: &'a DrawingArea<SVGBackend<'b>, plotters::coord::Shift>,
    axis: Axis,
    top: i32,
    bottom: i32,
}

impl Page<'_, '_> {
    fn all(&self, trace: &Trace, legend: &Legend<'_>, bands: &[Band]) -> Result<(), TraceError> {
        self.root.fill(&WHITE).map_err(draw_error)?;
        let title = if trace.title.is_empty() { "timeline" } else { &trace.title };
        self.text(title, (self.axis.left, TITLE / 2), FONT + 5, HPos::Left)?;
        self.legend(legend)?;
        for band in bands {
            self.rect((self.axis.left, band.top), (self.axis.right, band.top + band.height), BAND)?;
        }
        self.time_axis()?;
        let figures = Figures::of(trace);
        self.text("exposed wait", (self.axis.right + 10, self.top - 10), FONT, HPos::Left)?;
        for (band, figures) in bands.iter().zip(&figures.pes) {
            self.band_labels(band, &trace.track_name)?;
            let (name, ns) = unit(figures.exposed_wait_ns);
            let share = 100.0 * figures.exposed_wait_ns as f64 / (self.axis.end - self.axis.start) as f64;
            let text = format!("{:.1} {name} ({share:.1} %)", figures.exposed_wait_ns as f64 / ns);
            self.text(&text, (self.axis.right + 10, band.top + band.height / 2), FONT, HPos::Left)?;
        }
        self.events(trace, legend, bands)
    }

    fn legend(&self, legend: &Legend<'_>) -> Result<(), TraceError> {
        for (&(name, _, colour), (row, x)) in legend.0.iter().zip(legend.places(self.axis.right - self.axis.left)) {
            let (x, y) = (self.axis.left + x, TITLE + row * LEGEND_ROW + LEGEND_ROW / 2);
            self.rect((x, y - 5), (x + 10, y + 5), colour)?;
            self.text(name, (x + 16, y), FONT, HPos::Left)?;
        }
        Ok(())
    }

    fn time_axis(&self) -> Result<(), TraceError> {
        let Axis { start, end, left, right } = self.axis;
        let (name, ns) = unit(end - start);
        let step = self.axis.step();
        let decimals = if (step as f64) < ns { (ns / step as f64).log10().ceil() as usize } else { 0 };
        for mark in (0..).map(|i| i * step).take_while(|mark| *mark <= end - start) {
            let x = self.axis.x(start + mark);
            self.line((x, self.top), (x, self.bottom), GRID)?;
            let text = format!("{:.decimals$}", mark as f64 / ns);
            self.text(&text, (x, self.bottom + 10), FONT, HPos::Center)?;
        }
        self.line((left, self.bottom), (right, self.bottom), INK)?;
        self.text(&format!("time in {name}"), ((left + right) / 2, self.bottom + 30), FONT, HPos::Center)
    }

    fn band_labels(&self, band: &Band, track_name: &str) -> Result<(), TraceError> {
        let middle = band.top + band.height / 2;
        let shown = band.shown();
        let numbers_fit = band.row > FONT;
        let folded = (shown < band.tracks.len()).then(|| format!("{shown} of {}", band.tracks.len()));
        let note = folded.or_else(|| (!numbers_fit && shown > 1).then(|| format!("{shown} {track_name}s")));
        let note = note.filter(|_| band.height >= 3 * FONT);
        let label_y = if note.is_some() { middle - FONT * 2 / 3 } else { middle };
        self.text(&format!("PE {}", band.pe), (10, label_y), FONT + 1, HPos::Left)?;
        if let Some(note) = note {
            self.text(&note, (10, middle + FONT * 2 / 3), FONT - 1, HPos::Left)?;
        }
        if numbers_fit {
            for &track in &band.tracks[..shown] {
                if let Some((top, bottom)) = band.row_of(track) {
                    let label =
                        if track == band.tracks[0] { format!("{track_name} {track}") } else { track.to_string() };
                    self.text(&label, (self.axis.left - 6, (top + bottom) / 2), FONT - 2, HPos::Right)?;
                }
            }
        }
        Ok(())
    }

    fn events(&self, trace: &Trace, legend: &Legend<'_>, bands: &[Band]) -> Result<(), TraceError> {
        for band in bands {
            let of_band = trace.events.iter().filter(|e| e.pe == band.pe);
            for event in &joined(of_band, self.axis.ns_per_pixel()) {
                if let Some((top, bottom)) = band.row_of(event.track) {
                    let (left, right) = (self.axis.x(event.start_ns), self.axis.x(event.end_ns));
                    // A gap of one pixel tells wide neighbours of one colour apart.
                    let right = if right - left > THIN { right - 1 } else { right.max(left + 1) };
                    self.rect((left, top + 1), (right, bottom - 1), legend.colour(event))?;
                }
            }
        }
        Ok(())
    }

    fn text(&self, text: &str, at: (i32, i32), size: i32, side: HPos) -> Result<(), TraceError> {
        let style = TextStyle::from(("sans-serif", size).into_font()).color(&INK).pos(Pos::new(side, VPos::Center));
        self.root.draw(&Text::new(text, at, style)).map_err(draw_error)
    }

    fn rect(&self, from: (i32, i32), to: (i32, i32), colour: RGBColor) -> Result<(), TraceError> {
        self.root.draw(&Rectangle::new([from, to], colour.filled())).map_err(draw_error)
    }

    fn line(&self, from: (i32, i32), to: (i32, i32), colour: RGBColor) -> Result<(), TraceError> {
        self.root.draw(&PathElement::new([from, to], colour.stroke_width(1))).map_err(draw_error)
    }
}

/// Events in the order to paint them, outer ones first. A thin one is joined to the one before it of the same track and
/// step if less than half a pixel is between them, so that a drawing does not grow with marks nobody can see.
fn joined<'a>(events: impl Iterator<Item = &'a Event>, ns_per_pixel: f64) -> Vec<Event> {
    let (gap, thin) = ((ns_per_pixel / 2.0) as u64, (ns_per_pixel * f64::from(THIN)) as u64);
    let mut sorted: Vec<_> = events.collect();
    sorted.sort_by_key(|e| (e.track, e.kind, &e.name, e.start_ns));
    let mut joined: Vec<Event> = Vec::new();
    for event in sorted {
        match joined.last_mut() {
            Some(last)
                if (last.track, last.kind, &last.name) == (event.track, event.kind, &event.name)
                    && event.start_ns <= last.end_ns.saturating_add(gap)
                    && event.end_ns.saturating_sub(event.start_ns) <= thin =>
            {
                last.end_ns = last.end_ns.max(event.end_ns);
            }
            _ => joined.push(event.clone()),
        }
    }
    joined.sort_by_key(|e| (e.start_ns, Reverse(e.end_ns)));
    joined
}

#[cfg(test)]
mod tests {
    use super::super::tests::event;
    use super::*;

    fn example(pes: u32, tracks: u32) -> Trace {
        let mut trace = Trace::new("kda forward <2 PEs>", "worker");
        for (pe, track) in (0..pes).flat_map(|pe| (0..tracks).map(move |track| (pe, track))) {
            let shift = u64::from(track) * 3_000;
            trace.events.push(event(pe, track, "prep", shift, 40_000));
            trace.events.push(event(pe, track, "scan", 40_000, 120_000 + shift));
            trace.events.push(event(pe, track, "wait", 120_000 + shift, 150_000 + u64::from(pe) * 2000));
        }
        trace
    }

    fn size_of_drawing(svg: &str) -> (u32, u32) {
        let number = |name: &str| svg.split(&format!(" {name}=\"")).nth(1).unwrap().split('"').next().unwrap().parse();
        (number("width").unwrap(), number("height").unwrap())
    }

    #[test]
    fn a_drawing_has_its_title_legend_labels_and_axis() {
        let svg = svg(&example(2, 4), Size::default()).unwrap();
        for text in
            ["kda forward &lt;2 PEs&gt;", "prep", "scan", "wait", "PE 0", "PE 1", "worker 0", "time in us", ">\n140\n<"]
        {
            assert!(svg.contains(text), "{text} in {svg}");
        }
        assert_eq!(size_of_drawing(&svg).0, 1000);
        let of_colour = |c: RGBColor| svg.matches(&format!("fill=\"#{:02X}{:02X}{:02X}\"", c.0, c.1, c.2)).count();
        // 2 PEs x 4 workers, and the legend.
        assert_eq!(of_colour(palette(Kind::Compute)[0]), 9);
        assert_eq!(of_colour(palette(Kind::Wait)[0]), 9);
    }

    #[test]
    fn many_tracks_are_folded_and_many_pes_make_it_higher() {
        let svg_of = |pes, tracks| svg(&example(pes, tracks), Size::default()).unwrap();
        assert!(svg_of(2, 40).contains("16 of 40"));
        assert!(size_of_drawing(&svg_of(16, 16)).1 > 16 * 16 * ROW.0 as u32);
    }

    #[test]
    fn thin_marks_that_touch_are_joined() {
        let events = [
            event(0, 0, "scan", 0, 10),
            event(0, 0, "scan", 11, 20),
            event(0, 0, "scan", 20, 40),
            event(0, 0, "wait", 12, 14),
            event(0, 0, "scan", 50, 51),
            event(0, 1, "scan", 20, 30),
        ];
        let drawn = joined(events.iter(), 4.0);
        let want = [
            event(0, 0, "scan", 0, 20),
            event(0, 0, "wait", 12, 14),
            event(0, 0, "scan", 20, 40),
            event(0, 1, "scan", 20, 30),
            event(0, 0, "scan", 50, 51),
        ];
        assert_eq!(drawn, want);
    }

    #[test]
    fn a_trace_without_events_is_not_drawn() {
        let error = svg(&Trace::new("", ""), Size::default()).unwrap_err();
        assert!(error.to_string().contains("no events"));
    }

    #[test]
    fn an_instant_can_be_drawn() {
        let mut trace = Trace::new("", "worker");
        trace.events = vec![event(0, 0, "scan", 5, 5)];
        assert!(svg(&trace, Size { width: 0, height: 0 }).unwrap().contains("time in us"));
    }
}
