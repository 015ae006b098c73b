//! The documents: their links lead somewhere, and their commands are ones that the program takes.

use std::collections::HashSet;
use std::path::{Path, PathBuf};

use clap::Parser;
use deltalink::cli::Cli;

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

/// Path from the root and text of every document.
fn documents() -> Vec<(PathBuf, String)> {
    let mut paths = vec![PathBuf::from("README.md")];
    for entry in std::fs::read_dir(root().join("docs")).expect("the folder docs") {
        let name = PathBuf::from(entry.expect("an entry of docs").file_name());
        if name.extension().is_some_and(|extension| extension == "md") {
            paths.push(Path::new("docs").join(name));
        }
    }
    assert!(paths.len() > 1, "no documents in docs");
    let read = |path: PathBuf| {
        let text = std::fs::read_to_string(root().join(&path)).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
        (path, text)
    };
    paths.into_iter().map(read).collect()
}

/// The text outside of fenced blocks, and the fenced blocks with their languages.
fn split(text: &str) -> (String, Vec<(String, Vec<String>)>) {
    let (mut prose, mut blocks, mut open) = (String::new(), Vec::new(), None::<(String, Vec<String>)>);
    for line in text.lines() {
        match (&mut open, line.strip_prefix("```")) {
            (None, Some(language)) => open = Some((language.to_owned(), Vec::new())),
            (None, None) => prose += &format!("{line}\n"),
            (Some(_), Some(_)) => blocks.extend(open.take()),
            (Some((_, lines)), None) => lines.push(line.to_owned()),
        }
    }
    assert!(open.is_none(), "a fenced block does not end");
    (prose, blocks)
}

/// Targets of `[..](target)`.
fn links(prose: &str) -> Vec<&str> {
    prose.split("](").skip(1).map(|rest| rest.split(')').next().unwrap_or_default()).collect()
}

/// The anchors that a page makes of the headings: lower case, hyphens for spaces, without other punctuation.
fn anchors(prose: &str) -> HashSet<String> {
    let headings = prose.lines().filter(|line| line.starts_with('#'));
    let anchor = |heading: &str| {
        let words = heading.trim_start_matches('#').trim().to_lowercase().replace(' ', "-");
        words.chars().filter(|c| c.is_alphanumeric() || "-_".contains(*c)).collect()
    };
    headings.map(anchor).collect()
}

#[test]
fn links_lead_somewhere() {
    let mut local = 0;
    for (path, text) in documents() {
        let (prose, _) = split(&text);
        for link in links(&prose).into_iter().filter(|link| !link.contains("://")) {
            let (file, anchor) = link.split_once('#').unwrap_or((link, ""));
            let folder = path.parent().unwrap_or(Path::new(""));
            let target = if file.is_empty() { path.clone() } else { folder.join(file) };
            assert!(root().join(&target).exists(), "{}: {link} leads nowhere", path.display());
            if !anchor.is_empty() {
                let there = std::fs::read_to_string(root().join(&target)).expect("a page with anchors");
                assert!(anchors(&split(&there).0).contains(anchor), "{}: no heading {link}", path.display());
            }
            local += 1;
        }
    }
    assert!(local > 20, "only {local} links were found");
}

#[test]
fn commands_are_ones_that_the_program_takes() {
    let mut commands = 0;
    for (path, text) in documents() {
        let shell = split(&text).1.into_iter().filter(|(language, _)| language == "sh");
        for line in shell.flat_map(|(_, lines)| lines) {
            let words: Vec<&str> = line.split(" # ").next().unwrap_or_default().split_whitespace().collect();
            let program = words.iter().position(|&word| word == "deltalink" || word == "--");
            let Some(program) = program else { continue };
            let words = std::iter::once("deltalink").chain(words[program + 1..].iter().copied());
            if let Err(error) = Cli::try_parse_from(words) {
                panic!("{}: {line}\n{error}", path.display());
            }
            commands += 1;
        }
    }
    assert!(commands > 5, "only {commands} commands were found");
}
