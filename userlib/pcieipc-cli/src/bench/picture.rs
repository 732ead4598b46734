// SPDX-License-Identifier: MIT OR Apache-2.0
//! Time against size, both on logarithmic axes, as SVG.

use svg::{
    Document, Node,
    node::element::{Circle, Line as Stroke, Polyline, Rectangle, Text},
};

const COLOURS: [&str; 8] = ["#1f5fbf", "#d1343c", "#2a8f4d", "#b3721b", "#7a3fa8", "#16202c", "#0e8f94", "#8a8a8a"];
const WIDTH: f64 = 860.0;
const HEIGHT: f64 = 520.0;
const LEFT: f64 = 70.0;
const RIGHT: f64 = 200.0;
const TOP: f64 = 50.0;
const BOTTOM: f64 = 56.0;

/// One curve.
#[derive(Debug, Clone)]
pub struct Line {
    /// What it is.
    pub name: String,
    /// Bytes and microseconds, both above zero.
    pub points: Vec<(f64, f64)>,
}

/// Draws the curves with a legend.
pub fn draw(title: &str, lines: &[Line]) -> String {
    let points = || lines.iter().flat_map(|l| &l.points).filter(|(x, y)| *x > 0.0 && *y > 0.0);
    let range = |values: Vec<f64>, base: f64| {
        let low = values.iter().copied().fold(f64::INFINITY, f64::min).log(base).floor();
        let high = values.iter().copied().fold(0.0, f64::max).log(base).ceil();
        if low.is_finite() && high > low { (low, high) } else { (0.0, 1.0) }
    };
    let (x0, x1) = range(points().map(|p| p.0).collect(), 4.0);
    let (y0, y1) = range(points().map(|p| p.1).collect(), 10.0);
    let x = |bytes: f64| LEFT + (bytes.log(4.0) - x0) / (x1 - x0) * (WIDTH - LEFT - RIGHT);
    let y = |us: f64| HEIGHT - BOTTOM - (us.log10() - y0) / (y1 - y0) * (HEIGHT - TOP - BOTTOM);

    let mut document =
        Document::new().set("viewBox", (0, 0, WIDTH, HEIGHT)).set("font-family", "'DejaVu Sans', Helvetica, Arial, sans-serif");
    document.append(Rectangle::new().set("width", "100%").set("height", "100%").set("fill", "#ffffff"));
    document.append(text(LEFT, 28.0, title, 17, "start"));
    let rule = |x1: f64, y1: f64, x2: f64, y2: f64| {
        Stroke::new().set("x1", x1).set("y1", y1).set("x2", x2).set("y2", y2).set("stroke", "#d7dde4").set("stroke-width", 1)
    };
    for power in x0 as i32..=x1 as i32 {
        let at = x(4f64.powi(power));
        document.append(rule(at, TOP, at, HEIGHT - BOTTOM));
        document.append(text(at, HEIGHT - BOTTOM + 18.0, &size(4f64.powi(power)), 11, "middle"));
    }
    for power in y0 as i32..=y1 as i32 {
        let at = y(10f64.powi(power));
        document.append(rule(LEFT, at, WIDTH - RIGHT, at));
        document.append(text(LEFT - 8.0, at + 4.0, &time(10f64.powi(power)), 11, "end"));
    }
    document.append(text((LEFT + WIDTH - RIGHT) / 2.0, HEIGHT - 14.0, "bytes", 12, "middle"));
    for (i, line) in lines.iter().filter(|l| !l.points.is_empty()).enumerate() {
        let colour = COLOURS[i % COLOURS.len()];
        let places: Vec<String> = line.points.iter().map(|(b, t)| format!("{:.1},{:.1}", x(*b), y(*t))).collect();
        let curve = Polyline::new().set("points", places.join(" ")).set("fill", "none");
        document.append(curve.set("stroke", colour).set("stroke-width", 2));
        for (b, t) in &line.points {
            document.append(Circle::new().set("cx", x(*b)).set("cy", y(*t)).set("r", 3).set("fill", colour));
        }
        let row = TOP + 10.0 + 22.0 * i as f64;
        document.append(
            Rectangle::new()
                .set("x", WIDTH - RIGHT + 16.0)
                .set("y", row - 6.0)
                .set("width", 14)
                .set("height", 4)
                .set("fill", colour),
        );
        document.append(text(WIDTH - RIGHT + 38.0, row, &line.name, 12, "start"));
    }
    document.to_string()
}

fn text(x: f64, y: f64, what: &str, size: u32, anchor: &str) -> Text {
    Text::new(what).set("x", x).set("y", y).set("font-size", size).set("text-anchor", anchor).set("fill", "#16202c")
}

fn size(bytes: f64) -> String {
    match bytes as u64 {
        b if b >= 1 << 30 => format!("{} GiB", b >> 30),
        b if b >= 1 << 20 => format!("{} MiB", b >> 20),
        b if b >= 1 << 10 => format!("{} KiB", b >> 10),
        b => format!("{b} B"),
    }
}

fn time(us: f64) -> String {
    if us >= 1e6 {
        format!("{} s", us / 1e6)
    } else if us >= 1e3 {
        format!("{} ms", us / 1e3)
    } else {
        format!("{us} µs")
    }
}
