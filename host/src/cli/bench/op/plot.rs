//! Times over tokens as a drawing.

use plotters::prelude::*;

use super::super::Envelope;
use super::report::{Measured, Settings};

const SIZE: (u32, u32) = (900, 520);
/// Colours that readers with colour blindness tell apart.
const COLOURS: [RGBColor; 6] = [
    RGBColor(0x00, 0x72, 0xb2),
    RGBColor(0xd5, 0x5e, 0x00),
    RGBColor(0x00, 0x9e, 0x73),
    RGBColor(0xcc, 0x79, 0xa7),
    RGBColor(0xe6, 0x9f, 0x00),
    RGBColor(0x56, 0xb4, 0xe9),
];

/// A line for each pass, mode and kind of gates: the median, with a bar from the tenth at one end to that at the other. Both
/// axes are logarithmic, so that times proportional to tokens are straight lines of one slope.
///
/// # Errors
/// Why it cannot be drawn.
pub(super) fn svg(envelope: &Envelope<Settings, Measured>) -> Result<String, String> {
    let points = &envelope.points;
    let mut lines: Vec<(String, Vec<&Measured>)> = Vec::new();
    for point in points {
        let name = format!("{}, {}, {} gates", point.pass, point.mode, point.gates);
        match lines.iter_mut().find(|(known, _)| *known == name) {
            Some((_, line)) => line.push(point),
            None => lines.push((name, vec![point])),
        }
    }
    lines.iter_mut().for_each(|(_, line)| line.sort_by_key(|point| point.tokens));
    let tokens = || points.iter().map(|point| point.tokens as f64);
    let times = || points.iter().flat_map(|point| [point.time_us.p10, point.time_us.p90]).filter(|&us| us > 0.0);
    let (low, high) = (times().fold(f64::INFINITY, f64::min), times().fold(0.0, f64::max));
    if high <= 0.0 {
        return Err("no time is above 0".into());
    }
    let (x0, x1) = (tokens().fold(f64::INFINITY, f64::min) / 1.2, tokens().fold(0.0, f64::max) * 1.2);
    let mut text = String::new();
    draw(&mut text, &title(&envelope.settings), &lines, (x0..x1, low / 1.5..high * 1.5)).map_err(|e| e.to_string())?;
    Ok(text)
}

fn title(settings: &Settings) -> String {
    let Settings { op, dtype, value_heads, key_dim, value_dim, pes, device, .. } = settings;
    format!("{op} {dtype}, {value_heads} heads, K={key_dim} V={value_dim}, {pes} PEs ({device})")
}

fn draw(
    text: &mut String,
    title: &str,
    lines: &[(String, Vec<&Measured>)],
    (x, y): (std::ops::Range<f64>, std::ops::Range<f64>),
) -> Result<(), Box<dyn std::error::Error>> {
    let area = SVGBackend::with_string(text, SIZE).into_drawing_area();
    area.fill(&WHITE)?;
    let mut chart = ChartBuilder::on(&area)
        .caption(title, ("sans-serif", 18))
        .margin(12)
        .x_label_area_size(42)
        .y_label_area_size(70)
        .build_cartesian_2d(x.log_scale(), y.log_scale())?;
    chart
        .configure_mesh()
        .x_desc("tokens of each PE")
        .y_desc("time of a step, us")
        .x_label_formatter(&|tokens| format!("{tokens:.0}"))
        .y_label_formatter(&|us| format!("{us:.0}"))
        .draw()?;
    for ((name, line), colour) in lines.iter().zip(COLOURS.iter().cycle()) {
        let medians = line.iter().map(|point| (point.tokens as f64, point.time_us.median));
        chart
            .draw_series(LineSeries::new(medians, colour.stroke_width(2)))?
            .label(name.as_str())
            .legend(move |(x, y)| PathElement::new([(x, y), (x + 18, y)], colour.stroke_width(2)));
        chart.draw_series(line.iter().map(|point| {
            let time = &point.time_us;
            ErrorBar::new_vertical(point.tokens as f64, time.p10, time.median, time.p90, colour.filled(), 8)
        }))?;
    }
    chart
        .configure_series_labels()
        .position(SeriesLabelPosition::UpperLeft)
        .background_style(WHITE.mix(0.85))
        .border_style(RGBColor(0xd8, 0xd8, 0xd8))
        .draw()?;
    drop(chart);
    area.present()?;
    Ok(())
}
