// SPDX-License-Identifier: MIT OR Apache-2.0
//! `pcieipc generate`: what packages ship beside the command, made of its own arguments.

use std::{fs, io, path::PathBuf};

use clap::{Command, CommandFactory};
use clap_complete::Shell;

use crate::failure::{Failure, with_remedy};

/// Write manual pages and completions, for packages
#[derive(Debug, clap::Args)]
pub struct Generate {
    /// Folder for pcieipc-COMMAND.1, pcieipc.bash, _pcieipc and pcieipc.fish
    folder: PathBuf,
}

impl Generate {
    pub fn run(self) -> Result<(), Failure> {
        let failed = |e: io::Error| Failure::Run(format!("{}: {}", self.folder.display(), with_remedy(&e)));
        fs::create_dir_all(&self.folder).map_err(failed)?;
        let mut command = crate::Arguments::command();
        command.build();
        for shell in [Shell::Bash, Shell::Zsh, Shell::Fish] {
            clap_complete::generate_to(shell, &mut visible(), "pcieipc", &self.folder).map_err(failed)?;
        }
        // pcieipc(1) itself is written by hand.
        for sub in shown(&command) {
            self.pages(sub, &format!("pcieipc {}", sub.get_name())).map_err(failed)?;
        }
        Ok(())
    }

    /// A page for a command, and one for each below it.
    fn pages(&self, command: &Command, call: &str) -> io::Result<()> {
        // What `man` is asked for; clap keeps names for the life of the program.
        let name: &'static str = call.replace(' ', "-").leak();
        let page = command.clone().name(name).display_name(name).bin_name(call).version(env!("CARGO_PKG_VERSION"));
        let mut text = Vec::new();
        // The same page each time: the version stands where others have the day.
        let version = concat!("version ", env!("CARGO_PKG_VERSION"));
        clap_mangen::Man::new(page).section("1").date(version).source("pcieipc").manual("User Commands").render(&mut text)?;
        fs::write(self.folder.join(format!("{name}.1")), text)?;
        for sub in shown(command) {
            self.pages(sub, &format!("{call} {}", sub.get_name()))?;
        }
        Ok(())
    }
}

/// The commands that are meant for people.
fn shown(command: &Command) -> impl Iterator<Item = &Command> {
    command.get_subcommands().filter(|c| !c.is_hide_set() && c.get_name() != "help")
}

/// The command without the others: completions would show them.
fn visible() -> Command {
    let whole = crate::Arguments::command();
    let mut only =
        Command::new("pcieipc").version(env!("CARGO_PKG_VERSION")).about(whole.get_about().cloned().unwrap_or_default());
    for sub in shown(&whole) {
        only = only.subcommand(sub.clone());
    }
    only
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_visible_command_has_a_page_and_completions_and_hidden_ones_have_none() {
        let folder = tempfile::tempdir().unwrap();
        Generate { folder: folder.path().to_owned() }.run().unwrap();
        let read = |name: &str| fs::read_to_string(folder.path().join(name)).unwrap();
        let shells = [read("pcieipc.bash"), read("_pcieipc"), read("pcieipc.fish")];
        for sub in crate::Arguments::command().get_subcommands() {
            let name = sub.get_name();
            let page = folder.path().join(format!("pcieipc-{name}.1"));
            assert_eq!(page.exists(), !sub.is_hide_set(), "{name}");
            assert_eq!(shells[2].contains(&format!("-a \"{name}\"")), !sub.is_hide_set(), "{name}");
            assert!(sub.is_hide_set() || shells.iter().all(|s| s.contains(name)), "{name}");
        }
        let page = read("pcieipc-doctor.1");
        assert!(page.contains(".TH pcieipc-doctor 1") && page.contains("fix\\-script"), "{page}");
    }
}
