// SPDX-License-Identifier: MIT OR Apache-2.0
//! The documents: links lead somewhere, and the commands that they show are taken by the command, the Makefile and the scripts.

mod harness;

use std::{
    collections::BTreeSet,
    fs,
    path::{Path, PathBuf},
};

use harness::pcieipc;

fn repository() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../..").canonicalize().unwrap()
}

/// All documents, with their paths.
fn documents() -> Vec<(PathBuf, String)> {
    let repository = repository();
    let mut paths = Vec::new();
    for folder in [".", "docs", "userlib/python", "tests/data"] {
        for entry in fs::read_dir(repository.join(folder)).unwrap() {
            let path = entry.unwrap().path();
            if path.extension().is_some_and(|e| e == "md") {
                paths.push(path);
            }
        }
    }
    paths.sort();
    assert!(paths.len() > 10, "{paths:?}");
    paths.into_iter().map(|path| (path.clone(), fs::read_to_string(&path).unwrap())).collect()
}

/// `## A heading: of words` is `a-heading-of-words`.
fn anchors(text: &str) -> BTreeSet<String> {
    let headings = text.lines().filter(|l| l.starts_with('#')).map(|l| l.trim_start_matches('#').trim());
    let anchor = |heading: &str| {
        let kept = heading.chars().filter(|c| c.is_alphanumeric() || matches!(c, ' ' | '-' | '_'));
        kept.collect::<String>().to_lowercase().replace(' ', "-")
    };
    headings.map(anchor).collect()
}

/// Targets of `[text](target)`.
fn links(text: &str) -> Vec<&str> {
    text.split("](").skip(1).filter_map(|rest| rest.split_once(')')).map(|(target, _)| target).collect()
}

#[test]
fn every_link_leads_somewhere() {
    let mut broken = Vec::new();
    for (path, text) in documents() {
        for target in links(&text) {
            if target.contains("://") || target.starts_with("mailto:") {
                continue;
            }
            let (file, anchor) = target.split_once('#').map_or((target, None), |(file, anchor)| (file, Some(anchor)));
            let other = if file.is_empty() { path.clone() } else { path.parent().unwrap_or(Path::new(".")).join(file) };
            let found = match anchor {
                None => other.exists(),
                Some(anchor) => fs::read_to_string(&other).is_ok_and(|text| anchors(&text).contains(anchor)),
            };
            if !found {
                broken.push(format!("{}: {target}", path.display()));
            }
        }
    }
    assert!(broken.is_empty(), "\n{}", broken.join("\n"));
}

/// Lines of code blocks, fenced or indented, and code within text.
fn code(text: &str) -> Vec<&str> {
    let (blocks, prose) = blocks_and_prose(text);
    blocks.into_iter().chain(prose.iter().flat_map(|line| line.split('`').skip(1).step_by(2))).collect()
}

/// Lines of code blocks, and all others.
fn blocks_and_prose(text: &str) -> (Vec<&str>, Vec<&str>) {
    let (mut blocks, mut prose, mut fenced, mut blank) = (Vec::new(), Vec::new(), false, true);
    let mut indented = false;
    for line in text.lines() {
        if line.trim_start().starts_with("```") {
            fenced = !fenced;
        } else {
            // Indented code stands apart; what continues a list does not.
            indented = line.starts_with("    ") && (blank || indented);
            if fenced || indented { blocks.push(line.trim()) } else { prose.push(line) }
        }
        blank = line.trim().is_empty();
    }
    (blocks, prose)
}

/// The words of a command line up to the first thing that belongs to the shell.
fn words(line: &str) -> Vec<String> {
    let (mut words, mut word, mut quoted) = (Vec::new(), String::new(), false);
    for c in line.chars() {
        match c {
            '\'' => quoted = !quoted,
            ' ' if !quoted => {
                if !word.is_empty() {
                    words.push(std::mem::take(&mut word));
                }
            }
            '|' | '>' | '<' | ';' | '&' | '#' if !quoted => break,
            c => word.push(c),
        }
    }
    if !word.is_empty() {
        words.push(word);
    }
    words
}

#[test]
fn every_command_shown_is_taken_by_the_command() {
    let folder = tempfile::tempdir().unwrap();
    let (mut wrong, mut tried) = (Vec::new(), BTreeSet::new());
    for (path, text) in documents() {
        if path.ends_with("CHANGELOG.md") {
            continue;
        }
        for line in code(&text) {
            let line = line.trim_start_matches("$ ").trim_start_matches("sudo ");
            let Some(rest) = line.strip_prefix("pcieipc ").or(line.strip_prefix("target/release/pcieipc ")) else { continue };
            // What stands for something else is no command.
            let words = words(rest);
            let placeholder = |w: &String| w.contains('…') || w.contains("...") || w.starts_with('[') || w == "COMMAND";
            if words.is_empty() || words.iter().any(placeholder) || !words[0].chars().all(|c| c.is_ascii_lowercase() || c == '-')
            {
                continue;
            }
            // What follows the command in a list of all commands is its description.
            let listed = rest[words[0].len()..].starts_with("   ") || !rest.starts_with(&words[0]);
            let words: Vec<String> = if listed { words[..1].to_vec() } else { words };
            if !tried.insert(words.clone()) {
                continue;
            }
            // Words before --help are looked at, and nothing is run.
            let ran = pcieipc(folder.path(), &[]).args(&words).arg("--help").output().unwrap();
            if !ran.status.success() {
                wrong.push(format!("{}: pcieipc {}\n{}", path.display(), words.join(" "), String::from_utf8_lossy(&ran.stderr)));
            }
        }
    }
    assert!(tried.len() > 30, "only {} commands were found", tried.len());
    assert!(wrong.is_empty(), "\n{}", wrong.join("\n"));
}

#[test]
fn every_target_and_script_shown_is_there() {
    let repository = repository();
    let makefile = fs::read_to_string(repository.join("Makefile")).unwrap();
    let targets: BTreeSet<&str> = makefile.lines().filter_map(|l| l.split_once(": ").map(|(t, _)| t)).collect();
    let mut missing = Vec::new();
    for (path, text) in documents() {
        for line in code(&text) {
            for part in line.split("&&") {
                let words = words(part.trim().trim_start_matches("$ ").trim_start_matches("sudo "));
                match words.first().map(String::as_str) {
                    Some("make") if words.get(1).is_none_or(|w| w != "-C") => {
                        let named = words[1..].iter().filter(|w| w.chars().all(|c| c.is_ascii_lowercase() || c == '-'));
                        missing.extend(
                            named.filter(|t| !targets.contains(t.as_str())).map(|t| format!("{}: make {t}", path.display())),
                        );
                    }
                    Some(script) if script.starts_with("scripts/") && !repository.join(script).exists() => {
                        missing.push(format!("{}: {script}", path.display()));
                    }
                    _ => {}
                }
            }
        }
    }
    assert!(missing.is_empty(), "\n{}", missing.join("\n"));
}

/// Commands shown in blocks that need more than any Linux machine has, and the test that runs them.
const ELSEWHERE: [(&str, &str); 5] = [
    ("pcieipc info", "tests/vm/bind.toml"),
    ("pcieipc bind", "tests/vm/bind.toml"),
    ("pcieipc inject", "tests/vm/inject_heal.sh"),
    ("pcieipc heal", "tests/vm/inject_heal.sh"),
    // It ends when it is told to.
    ("pcieipc watch", "tests/vm/watch_endpoints.sh"),
];

#[test]
fn every_command_shown_in_a_block_runs() {
    let (repository, folder) = (repository(), tempfile::tempdir().unwrap());
    let place = folder.path();
    let program = Path::new(env!("CARGO_BIN_EXE_pcieipc"));
    // What a reader has: the checkout's data, gradients of his own, hosts that were saved before, and in userlib what cargo built.
    for folder in ["tests", "userlib/target/release", "target"] {
        fs::create_dir_all(place.join(folder)).unwrap();
    }
    std::os::unix::fs::symlink(repository.join("tests/data"), place.join("tests/data")).unwrap();
    std::os::unix::fs::symlink(program, place.join("userlib/target/release/pcieipc")).unwrap();
    for rank in 0..4 {
        let name = format!("grads.{rank}.safetensors");
        fs::copy(repository.join("tests/data").join(&name), place.join(&name)).unwrap();
    }
    for saved in ["before.tar.gz", "host.tar.gz"] {
        assert!(pcieipc(place, &["snapshot", saved]).status().unwrap().success());
    }
    let path = format!("{}:{}", program.parent().unwrap().display(), std::env::var("PATH").unwrap());
    let (mut ran, mut failed, mut elsewhere) = (BTreeSet::new(), Vec::new(), BTreeSet::new());
    for (document, text) in documents() {
        for line in blocks_and_prose(&text).0 {
            let line = line.trim_start_matches("$ ").trim_start_matches("sudo ");
            let built = line.starts_with("target/release/pcieipc ");
            let Some(rest) = line.strip_prefix("pcieipc ").or(line.strip_prefix("target/release/pcieipc ")) else { continue };
            // Lists of commands with what they do are no commands.
            let subcommand = rest.split(' ').next().unwrap();
            let listed = rest[subcommand.len()..].starts_with("  ") && !rest[subcommand.len()..].trim_start().starts_with('#')
                || rest.starts_with('(');
            if listed || !ran.insert(line.to_owned()) {
                continue;
            }
            if let Some((command, _)) = ELSEWHERE.iter().find(|(command, _)| line.starts_with(command)) {
                elsewhere.insert(*command);
                continue;
            }
            // Drawing programs are not everybody's.
            let (line, drawn) = line.split_once(" | ").map_or((line, false), |(line, _)| (line, true));
            assert!(!drawn || line.contains("--format dot"), "{line}");
            let directory = if built { place.join("userlib") } else { place.to_owned() };
            let shell = std::process::Command::new("timeout")
                .args(["300", "sh", "-c", line])
                .env("PATH", &path)
                .current_dir(directory)
                .output()
                .unwrap();
            let (code, said) = (shell.status.code().unwrap_or(-1), String::from_utf8_lossy(&shell.stderr));
            let good = match subcommand {
                // The document's cards are in another machine, which is said.
                "doctor" if line.contains("--peers") => code == 2 && said.contains("no function 0000:41:00.0"),
                // 3 and 4 are about the machine.
                "doctor" => matches!(code, 0 | 3 | 4),
                _ => code == 0,
            };
            if !good {
                failed.push(format!("{}: {line}: {code}\n{said}", document.display()));
            }
        }
    }
    assert!(failed.is_empty(), "\n{}", failed.join("\n"));
    assert!(ran.len() - elsewhere.len() > 15, "only {} commands were found", ran.len());
    for (command, test) in ELSEWHERE {
        assert!(elsewhere.contains(command), "no document shows {command:?} any more");
        let subcommand = command.strip_prefix("pcieipc ").unwrap();
        let text = fs::read_to_string(repository.join(test)).unwrap();
        assert!(
            text.contains(command) || text.contains(&format!("\"{}\"", subcommand.replace(' ', "\", \""))),
            "{test} runs no {command:?}"
        );
    }
}
