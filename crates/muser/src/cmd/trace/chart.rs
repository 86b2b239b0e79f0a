//! A trace as a picture: one bar a kernel, as long as its time, the part that the limit allows filled.

use super::Line;
use crate::output;
use std::fmt::Write;

const LEFT: f64 = 330.0;
const BAR: f64 = 620.0;
const RIGHT: f64 = 260.0;
const ROW: f64 = 24.0;
const TOP: f64 = 70.0;

/// The picture of all lines in their order.
pub fn svg(title: &str, device: &str, lines: &[Line]) -> String {
    let longest = lines.iter().map(|l| l.seconds).fold(1e-12, f64::max);
    let total: f64 = lines.iter().map(|l| l.seconds).sum();
    let (width, height) = (LEFT + BAR + RIGHT, TOP + ROW * lines.len() as f64 + 40.0);
    let mut s = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{width}\" height=\"{height}\" viewBox=\"0 0 {width} {height}\" \
         font-family=\"system-ui, sans-serif\" font-size=\"12\">\n\
         <rect width=\"100%\" height=\"100%\" fill=\"#ffffff\"/>\n\
         <text x=\"12\" y=\"24\" font-size=\"16\" font-weight=\"600\">{}</text>\n\
         <text x=\"12\" y=\"44\" fill=\"#555555\">{}; {} in all; filled: what the limit allows, outlined: what was taken</text>\n",
        escape(title),
        escape(device),
        output::seconds(total)
    );
    for (i, line) in lines.iter().enumerate() {
        let y = TOP + ROW * i as f64;
        let length = BAR * line.seconds / longest;
        let filled = length * line.share().min(1.0);
        let colour = if line.memory { "#2f7fc1" } else { "#c1642f" };
        let label = format!("{} {} x{}", line.entry.name, line.entry.types, line.entry.calls.len());
        let value = format!(
            "{} ({:.1} %), {:.0} % of {}",
            output::seconds(line.seconds),
            100.0 * line.seconds / total,
            100.0 * line.share(),
            if line.memory { "memory" } else { "compute" }
        );
        let text = y + 15.0;
        let _ = writeln!(
            s,
            "<g><title>{}</title>\
             <text x=\"{:.1}\" y=\"{text:.1}\" text-anchor=\"end\">{}</text>\
             <rect x=\"{LEFT}\" y=\"{:.1}\" width=\"{filled:.1}\" height=\"16\" fill=\"{colour}\"/>\
             <rect x=\"{LEFT}\" y=\"{:.1}\" width=\"{length:.1}\" height=\"16\" fill=\"none\" stroke=\"{colour}\"/>\
             <text x=\"{:.1}\" y=\"{text:.1}\" fill=\"#333333\">{}</text></g>",
            escape(&line.kernel),
            LEFT - 8.0,
            escape(label.trim()),
            y + 3.0,
            y + 3.0,
            LEFT + length.max(1.0) + 8.0,
            escape(&value)
        );
    }
    let y = height - 16.0;
    let _ = writeln!(
        s,
        "<rect x=\"{LEFT}\" y=\"{:.1}\" width=\"12\" height=\"12\" fill=\"#2f7fc1\"/><text x=\"{:.1}\" y=\"{y:.1}\">memory limits</text>\
         <rect x=\"{:.1}\" y=\"{:.1}\" width=\"12\" height=\"12\" fill=\"#c1642f\"/><text x=\"{:.1}\" y=\"{y:.1}\">arithmetic limits</text>\n</svg>",
        y - 10.0,
        LEFT + 18.0,
        LEFT + 140.0,
        y - 10.0,
        LEFT + 158.0
    );
    s
}

fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}
