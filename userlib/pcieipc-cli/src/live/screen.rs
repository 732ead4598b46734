// SPDX-License-Identifier: MIT OR Apache-2.0
//! The picture on the terminal.

use pcieipc::topology::{Kind, Topology};
use ratatui::{
    Frame,
    layout::{Constraint, Layout},
    style::{Color, Modifier, Style},
    text::{Line, Span},
    widgets::{Block, Cell, Paragraph, Row, Table},
};

use super::{Observer, describe};
use crate::topo::{health::Health, text};

/// What the keys changed.
#[derive(Default)]
pub struct View {
    /// First line of the tree that is shown.
    pub scroll: u16,
    /// Show functions that are no cards.
    pub all: bool,
    /// Waiting for a key before anything moves on.
    pub paused: bool,
}

/// Draws tree, cards, endpoints and events.
pub fn draw(frame: &mut Frame<'_>, observer: &Observer, view: &View) {
    let tree = observer.follower.tree();
    let endpoints = if observer.endpoints.is_empty() { 0 } else { observer.endpoints.len().min(8) as u16 + 3 };
    let [top, middle, lower, bottom, foot] = Layout::vertical([
        Constraint::Min(8),
        Constraint::Length(cards(tree).len().min(12) as u16 + 3),
        Constraint::Length(endpoints),
        Constraint::Percentage(25),
        Constraint::Length(1),
    ])
    .areas(frame.area());
    let lines = tree_lines(tree, view.all);
    frame.render_widget(Paragraph::new(lines).scroll((view.scroll, 0)).block(Block::bordered().title(" PCIe tree ")), top);
    frame.render_widget(card_table(observer), middle);
    if endpoints > 0 {
        frame.render_widget(endpoint_table(observer), lower);
    }
    let room = usize::from(bottom.height.saturating_sub(2));
    let events: Vec<Line<'_>> = observer
        .events
        .iter()
        .rev()
        .take(room)
        .map(|e| {
            let seconds = e.time as u64 % 86_400;
            Line::from(format!("{:02}:{:02}:{:02} {}", seconds / 3600, seconds / 60 % 60, seconds % 60, describe(&e.change)))
        })
        .collect();
    frame.render_widget(Paragraph::new(events).block(Block::bordered().title(" events (UTC, newest first) ")), bottom);
    let hears =
        if observer.follower.hears_kernel() { "kernel's messages heard" } else { "no kernel messages: looking once an interval" };
    let paused = if view.paused { "PAUSED  " } else { "" };
    frame.render_widget(
        Paragraph::new(format!(
            " {paused}q quit  a all functions  p pause  ↑↓ scroll   {hears}, tree version {}",
            observer.follower.version()
        )),
        foot,
    );
}

fn colour(health: Health) -> Color {
    match health {
        Health::Best => Color::Green,
        Health::Slower => Color::Yellow,
        Health::Hurt => Color::LightRed,
        Health::Broken => Color::Red,
        Health::Unknown => Color::Gray,
    }
}

fn tree_lines(tree: &Topology, all: bool) -> Vec<Line<'static>> {
    // The drawing starts each function's line with its address, which gives the line its colour.
    text::draw(tree, all)
        .lines()
        .map(|line| {
            let address = line.split_whitespace().find_map(|w| w.parse().ok());
            let health = address.and_then(|a| tree.position(a)).map_or(Health::Unknown, |i| Health::of(tree, i));
            let style = if health == Health::Unknown { Style::new() } else { Style::new().fg(colour(health)) };
            Line::from(Span::styled(line.to_owned(), style))
        })
        .collect()
}

fn cards(tree: &Topology) -> Vec<usize> {
    let wanted = |i: &usize| tree.functions[*i].kind.is_peer() || matches!(tree.functions[*i].kind, Kind::Nic | Kind::Nvme);
    (0..tree.functions.len()).filter(wanted).collect()
}

fn card_table(observer: &Observer) -> Table<'static> {
    let tree = observer.follower.tree();
    let rows = cards(tree).into_iter().take(12).map(|index| {
        let function = &tree.functions[index];
        let hop = tree.hop(index);
        let state = |s: Option<pcieipc::topology::LinkState>| s.map_or("–".to_owned(), |s| s.to_string());
        // Ports on the way count for the card too.
        let ways =
            std::iter::once(index).chain(tree.ancestors(index)).filter_map(|i| observer.rates.get(&tree.functions[i].address));
        let sum = ways.fold([0.0; 3], |sum, rate| [sum[0] + rate[0], sum[1] + rate[1], sum[2] + rate[2]]);
        let rate = |r: f64| if r == 0.0 { "0".to_owned() } else { format!("{r:.1}") };
        Row::new([
            Cell::from(function.address.to_string()),
            Cell::from(function.kind.word()),
            Cell::from(state(hop.and_then(|h| h.now))).style(Style::new().fg(colour(Health::of(tree, index)))),
            Cell::from(state(hop.and_then(|h| h.best))),
            Cell::from(rate(sum[0])),
            Cell::from(rate(sum[1])),
            Cell::from(rate(sum[2])),
            // The module's own count where it drives the card, else the watcher's.
            Cell::from(
                observer
                    .endpoint(function.address)
                    .map(|e| e.generation)
                    .or(observer.follower.generation(function.address))
                    .map_or(String::new(), |g| g.to_string()),
            ),
            Cell::from(function.driver.clone().unwrap_or_default()),
        ])
    });
    let widths = [14, 12, 14, 14, 14, 12, 10, 11, 16].map(Constraint::Length);
    Table::new(rows, widths)
        .header(
            Row::new(["card", "kind", "link", "at best", "correctable/s", "non-fatal/s", "fatal/s", "generation", "driver"])
                .style(Style::new().add_modifier(Modifier::BOLD)),
        )
        .block(Block::bordered().title(" cards: links, AER rates on the way to the root "))
}

fn endpoint_table(observer: &Observer) -> Table<'static> {
    let rows = observer.endpoints.iter().take(8).map(|e| {
        let state = match e.state.as_str() {
            "live" => Color::Green,
            "recovering" => Color::Yellow,
            _ => Color::Red,
        };
        Row::new([
            Cell::from(e.address_text.clone()),
            Cell::from(e.state.clone()).style(Style::new().fg(state)),
            Cell::from(e.generation.to_string()),
            Cell::from(if e.attached { "yes" } else { "no" }),
            Cell::from(e.channels.to_string()),
            Cell::from(format!("{:.0}", e.doorbells_per_second)),
            Cell::from(format!("{:.1}", e.dma_bytes_per_second / 1e6)),
            Cell::from(e.interrupts.to_string()),
        ])
    });
    let widths = [14, 12, 12, 10, 10, 12, 12, 12].map(Constraint::Length);
    Table::new(rows, widths)
        .header(
            Row::new(["endpoint", "state", "generation", "attached", "channels", "doorbells/s", "MB/s engine", "interrupts"])
                .style(Style::new().add_modifier(Modifier::BOLD)),
        )
        .block(Block::bordered().title(" endpoints of the module "))
}

#[cfg(test)]
mod tests {
    use pcieipc::topology::import;
    use ratatui::{Terminal, backend::TestBackend};

    use super::*;
    use crate::live::prometheus;

    fn observer() -> Observer {
        let file =
            std::fs::File::open(concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/fixtures/qemu/degraded-links/host.tar.gz"));
        Observer::new(Box::new(import::open(file.unwrap()).unwrap()), false)
    }

    #[test]
    fn the_screen_shows_tree_links_and_errors_at_every_size() {
        let observer = observer();
        for (width, height) in [(140, 40), (80, 24), (20, 5), (1, 1)] {
            let mut terminal = Terminal::new(TestBackend::new(width, height)).unwrap();
            terminal.draw(|frame| draw(frame, &observer, &View::default())).unwrap();
            let text: String = terminal.backend().buffer().content().iter().map(|c| c.symbol()).collect();
            if width == 140 {
                for expected in ["DEGRADED", "0000:01:00.0", "16 GT/s x4", "correctable/s", "events"] {
                    assert!(text.contains(expected), "{expected}: {text}");
                }
            }
        }
    }

    #[test]
    fn metrics_follow_the_conventions_of_prometheus() {
        let observer = observer();
        let text = prometheus::text(&observer, &vec![true; observer.follower.tree().functions.len()]);
        assert!(text.contains("pcieipc_link_width_lanes{address=\"0000:01:00.0\"} 4\n"), "{text}");
        assert!(text.contains("pcieipc_link_best_width_lanes{address=\"0000:01:00.0\"} 16\n"));
        assert!(text.contains("pcieipc_aer_errors_total{address=\"0000:01:00.0\",severity=\"correctable\",kind=\"all\"} 0\n"));
        let mut seen = std::collections::HashSet::new();
        let mut family = "";
        for line in text.lines() {
            if let Some(rest) = line.strip_prefix("# TYPE ") {
                let (name, kind) = rest.split_once(' ').unwrap();
                assert_eq!(kind == "counter", name.ends_with("_total"), "{name}");
                family = name;
            } else if !line.starts_with('#') {
                let (series, value) = line.rsplit_once(' ').unwrap();
                assert!(series.starts_with(&format!("{family}{{")) && value.parse::<f64>().is_ok(), "{line}");
                assert!(seen.insert(series), "twice: {line}");
            }
        }
    }
}
