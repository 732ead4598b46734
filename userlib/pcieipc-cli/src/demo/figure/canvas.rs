// SPDX-License-Identifier: MIT OR Apache-2.0
//! Shapes and text in the report's look.

use svg::{
    Document, Node,
    node::element::{Line, Path, Rectangle, Text, Title, path::Data},
};

pub const INK: &str = "#16202c";
pub const MUTED: &str = "#5c6b7c";
pub const PANEL: &str = "#f1f4f8";
pub const RULE: &str = "#c9d3de";
pub const RED: &str = "#d1343c";
pub const FONT: &str = "Inter, 'Segoe UI', 'DejaVu Sans', Helvetica, Arial, sans-serif";

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Weight {
    Normal,
    Bold,
}

/// An SVG under construction; its height is known at the end.
pub struct Canvas {
    document: Document,
    width: f64,
}

impl Canvas {
    pub fn new(width: f64) -> Self {
        let paper = Rectangle::new().set("width", "100%").set("height", "100%").set("fill", "#ffffff");
        Self { document: Document::new().set("font-family", FONT).add(paper), width }
    }

    #[allow(clippy::too_many_arguments, reason = "a rectangle has that many properties")]
    pub fn rect(&mut self, x: f64, y: f64, width: f64, height: f64, fill: &str, stroke: Option<&str>, radius: f64) {
        self.hinted_rect([x, y, width, height], fill, stroke, radius, "");
    }

    /// A rectangle that shows `hint` under the pointer.
    pub fn hinted_rect(&mut self, [x, y, width, height]: [f64; 4], fill: &str, stroke: Option<&str>, radius: f64, hint: &str) {
        let mut rect =
            Rectangle::new().set("x", round(x)).set("y", round(y)).set("width", round(width)).set("height", round(height));
        rect = rect.set("fill", fill).set("rx", radius);
        if let Some(stroke) = stroke {
            rect = rect.set("stroke", stroke).set("stroke-width", 1.5);
        }
        if !hint.is_empty() {
            rect = rect.add(Title::new(hint));
        }
        self.add(rect);
    }

    pub fn text(&mut self, x: f64, y: f64, text: &str, size: f64, fill: &str, weight: Weight) {
        self.anchored(x, y, text, size, fill, weight, "start");
    }

    pub fn centred(&mut self, x: f64, y: f64, text: &str, size: f64, fill: &str, weight: Weight) {
        self.anchored(x, y, text, size, fill, weight, "middle");
    }

    #[allow(clippy::too_many_arguments, reason = "a text has that many properties")]
    fn anchored(&mut self, x: f64, y: f64, text: &str, size: f64, fill: &str, weight: Weight, anchor: &str) {
        let mut node = Text::new(text).set("x", round(x)).set("y", round(y)).set("font-size", size).set("fill", fill);
        if weight == Weight::Bold {
            node = node.set("font-weight", 600);
        }
        if anchor != "start" {
            node = node.set("text-anchor", anchor);
        }
        self.add(node);
    }

    pub fn line(&mut self, from: (f64, f64), to: (f64, f64), stroke: &str, width: f64, dashes: Option<&str>) {
        let mut line =
            Line::new().set("x1", round(from.0)).set("y1", round(from.1)).set("x2", round(to.0)).set("y2", round(to.1));
        line = line.set("stroke", stroke).set("stroke-width", width);
        if let Some(dashes) = dashes {
            line = line.set("stroke-dasharray", dashes);
        }
        self.add(line);
    }

    /// Down from one point, across, and down to another.
    pub fn elbow(&mut self, from: (f64, f64), to: (f64, f64), stroke: &str, dashes: Option<&str>) {
        let middle = (from.1 + to.1) / 2.0;
        let data = Data::new().move_to(from).vertical_line_to(middle).horizontal_line_to(to.0).vertical_line_to(to.1);
        let mut path = Path::new().set("d", data).set("fill", "none").set("stroke", stroke).set("stroke-width", 1.5);
        if let Some(dashes) = dashes {
            path = path.set("stroke-dasharray", dashes);
        }
        self.add(path);
    }

    fn add(&mut self, node: impl Into<Box<dyn Node>>) {
        self.document.append(node);
    }

    pub fn finish(mut self, height: f64) -> String {
        let size = (self.width, round(height));
        self.document = self.document.set("viewBox", (0, 0, size.0, size.1)).set("width", size.0).set("height", size.1);
        self.document.to_string()
    }
}

/// Tenths of a pixel are enough.
fn round(value: f64) -> f64 {
    (value * 10.0).round() / 10.0
}
