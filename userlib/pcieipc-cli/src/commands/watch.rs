// SPDX-License-Identifier: MIT OR Apache-2.0
//! `pcieipc watch`: the tree live.

use std::{
    fs::File,
    io::{ErrorKind, IsTerminal, Write},
    path::PathBuf,
    process::ExitCode,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use crossterm::event::{self, Event as Key, KeyCode, KeyEventKind, KeyModifiers};

use crate::{
    failure::{Failure, with_remedy},
    host_source::HostSource,
    live::{Event, Observer, describe, module_view::EndpointView, prometheus, screen},
    standard_streams,
    topo::text,
};

/// How soon a pressed key is answered.
const KEYS: Duration = Duration::from_millis(50);

/// Watch the tree live: links, errors, cards that come and go, endpoints of the module
#[derive(clap::Args)]
pub struct Watch {
    #[command(flatten)]
    source: HostSource,
    /// Write one JSON object for each event, to standard output or a file, in place of the screen
    #[arg(long, value_name = "FILE", num_args = 0..=1, default_missing_value = "-")]
    log: Option<PathBuf>,
    /// The same to standard output
    #[arg(long, conflicts_with = "log")]
    pub json: bool,
    /// Keep a file of metrics for node exporter's text collector up to date, such as /var/lib/node_exporter/pcieipc.prom
    #[arg(long, value_name = "FILE")]
    prometheus: Option<PathBuf>,
    /// Seconds between two looks; what the kernel tells is seen at once
    #[arg(long, value_name = "SECONDS", default_value_t = 0.5)]
    interval: f64,
    /// Stop after this many seconds
    #[arg(long, value_name = "SECONDS")]
    duration: Option<f64>,
    /// Show functions that are no cards too
    #[arg(long)]
    all: bool,
}

impl Watch {
    pub fn run(mut self) -> Result<ExitCode, Failure> {
        if self.json {
            self.log = Some("-".into());
        }
        if !(0.05..=3600.0).contains(&self.interval) || self.duration.is_some_and(|d| !(0.0..=1e9).contains(&d)) {
            return Err(Failure::Use("--interval takes 0.05 to 3600 seconds, --duration up to 1e9".into()));
        }
        let stop = Arc::new(AtomicBool::new(false));
        for signal in [signal_hook::consts::SIGINT, signal_hook::consts::SIGTERM] {
            signal_hook::flag::register(signal, stop.clone()).map_err(|e| Failure::Run(format!("signal {signal}: {e}")))?;
        }
        let mut observer = Observer::new(self.source.open()?, self.source.is_live());
        self.metrics(&observer)?;
        let on_screen = self.log.is_none() && self.prometheus.is_none() && std::io::stdout().is_terminal();
        if on_screen {
            self.screen(&mut observer, &stop)?
        } else {
            self.lines(&mut observer, &stop)?
        }
        Ok(ExitCode::SUCCESS)
    }

    fn interval(&self) -> Duration {
        Duration::from_secs_f64(self.interval)
    }

    fn over(&self, start: Instant, stop: &AtomicBool) -> bool {
        stop.load(Ordering::Relaxed) || self.duration.is_some_and(|d| start.elapsed().as_secs_f64() >= d)
    }

    fn metrics(&self, observer: &Observer) -> Result<(), Failure> {
        let Some(path) = &self.prometheus else { return Ok(()) };
        let tree = observer.follower.tree();
        prometheus::write(path, observer, &text::shown(tree, self.all))
            .map_err(|e| Failure::Run(format!("{}: {e}", path.display())))
    }

    /// Events as lines: JSON where asked for, else words; nothing but metrics where only those were asked for.
    fn lines(&self, observer: &mut Observer, stop: &AtomicBool) -> Result<(), Failure> {
        match self.log_lines(observer, stop) {
            // Whoever read has what it wanted.
            Err(Stopped::Log(error)) if error.kind() == ErrorKind::BrokenPipe => Ok(()),
            Err(Stopped::Log(error)) => Err(Failure::Run(format!("writing the log: {}", with_remedy(&error)))),
            Err(Stopped::Other(failure)) => Err(failure),
            Ok(()) => Ok(()),
        }
    }

    fn log_lines(&self, observer: &mut Observer, stop: &AtomicBool) -> Result<(), Stopped> {
        let mut log: Option<Box<dyn Write>> = match &self.log {
            Some(path) if path.as_os_str() == "-" => Some(Box::new(std::io::stdout())),
            Some(path) => {
                let file = File::options().create(true).append(true).open(path);
                Some(Box::new(file.map_err(|e| Failure::Use(format!("{}: {e}", path.display())))?))
            }
            None => None,
        };
        let start = Instant::now();
        if let Some(out) = &mut log {
            let functions = observer.follower.tree().functions.len();
            let hears = observer.follower.hears_kernel();
            let line = serde_json::json!({ "event": "start", "functions": functions, "hears_kernel": hears, "endpoints": observer.endpoints });
            writeln!(out, "{line}").and_then(|()| out.flush())?;
        }
        let mut states = None;
        while !self.over(start, stop) {
            // Short waits, so that a signal ends the watch soon; the kernel's messages end a wait at once.
            let events = observer
                .step(self.interval().min(Duration::from_millis(500)))
                .map_err(|e| Failure::Run(format!("kernel messages: {e}")))?;
            for event in &events {
                write_event(log.as_mut(), self.prometheus.is_none(), event)?;
            }
            let state = |e: &EndpointView| (e.id, e.state.clone(), e.generation, e.attached, e.channels, e.is_busy());
            let now: Vec<_> = observer.endpoints.iter().map(state).collect();
            // Rates change at every look, so endpoints that carry data have a line each time.
            let news = observer.endpoints.iter().any(EndpointView::is_busy) || states.as_ref() != Some(&now);
            if let Some(out) = log.as_mut().filter(|_| news) {
                let line = serde_json::json!({ "event": "endpoints", "endpoints": observer.endpoints });
                writeln!(out, "{line}").and_then(|()| out.flush())?;
            }
            states = Some(now);
            self.metrics(observer)?;
            // A reader that has left is noticed also where nothing happens.
            if self.prometheus.is_none()
                && standard_streams::reader_left()
                && self.log.as_deref().is_none_or(|p| p.as_os_str() == "-")
            {
                return Ok(());
            }
        }
        Ok(())
    }

    fn screen(&self, observer: &mut Observer, stop: &AtomicBool) -> Result<(), Failure> {
        let failed = |e: std::io::Error| Failure::Run(format!("the terminal: {e}"));
        let mut terminal = ratatui::try_init().map_err(failed)?;
        let outcome = self.screen_loop(&mut terminal, observer, stop).map_err(failed);
        ratatui::restore();
        outcome
    }

    fn screen_loop(
        &self,
        terminal: &mut ratatui::DefaultTerminal,
        observer: &mut Observer,
        stop: &AtomicBool,
    ) -> std::io::Result<()> {
        let start = Instant::now();
        let mut view = screen::View { all: self.all, ..screen::View::default() };
        let mut looked = Instant::now();
        while !self.over(start, stop) {
            terminal.draw(|frame| screen::draw(frame, observer, &view))?;
            while event::poll(KEYS)? {
                let Key::Key(key) = event::read()? else { continue };
                if key.kind != KeyEventKind::Press {
                    continue;
                }
                match key.code {
                    KeyCode::Char('q') | KeyCode::Esc => return Ok(()),
                    KeyCode::Char('c') if key.modifiers.contains(KeyModifiers::CONTROL) => return Ok(()),
                    KeyCode::Char('a') => view.all = !view.all,
                    KeyCode::Char('p') => view.paused = !view.paused,
                    KeyCode::Down => view.scroll = view.scroll.saturating_add(1),
                    KeyCode::Up => view.scroll = view.scroll.saturating_sub(1),
                    KeyCode::PageDown => view.scroll = view.scroll.saturating_add(20),
                    KeyCode::PageUp => view.scroll = view.scroll.saturating_sub(20),
                    _ => {}
                }
            }
            // The kernel's messages are looked for at each turn; a full look is made once an interval.
            if !view.paused && (looked.elapsed() >= self.interval() || observer.follower.heard()?) {
                observer.step(Duration::ZERO)?;
                looked = Instant::now();
            }
        }
        Ok(())
    }
}

/// Why the lines ended before their time.
enum Stopped {
    Log(std::io::Error),
    Other(Failure),
}

impl From<std::io::Error> for Stopped {
    fn from(error: std::io::Error) -> Self {
        Self::Log(error)
    }
}

impl From<Failure> for Stopped {
    fn from(failure: Failure) -> Self {
        Self::Other(failure)
    }
}

fn write_event(log: Option<&mut Box<dyn Write>>, speak: bool, event: &Event) -> std::io::Result<()> {
    match log {
        Some(out) => {
            serde_json::to_writer(&mut *out, event)?;
            writeln!(out)?;
            out.flush()
        }
        None if speak => writeln!(std::io::stdout(), "{}", describe(&event.change)),
        None => Ok(()),
    }
}
