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
    let (mut found, mut fenced, mut blank) = (Vec::new(), false, true);
    let mut indented = false;
    for line in text.lines() {
        if line.trim_start().starts_with("```") {
            fenced = !fenced;
        } else {
            // Indented code stands apart; what continues a list does not.
            indented = line.starts_with("    ") && (blank || indented);
            if fenced || indented {
                found.push(line.trim());
            } else {
                found.extend(line.split('`').skip(1).step_by(2));
            }
        }
        blank = line.trim().is_empty();
    }
    found
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
