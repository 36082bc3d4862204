//! The fuzz targets over their corpus: whatever a fuzzer found once is tested here on every compiler.

use std::path::{Path, PathBuf};

#[path = "../../fuzz/src/lib.rs"]
mod targets;

/// The files of a target, in a fixed order.
fn corpus(target: &str) -> Vec<PathBuf> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../fuzz/corpus").join(target);
    let list = std::fs::read_dir(&folder).unwrap_or_else(|e| panic!("{}: {e}", folder.display()));
    let mut files: Vec<PathBuf> = list.map(|entry| entry.expect("readable").path()).collect();
    files.sort();
    files
}

fn run(name: &str) {
    let (_, body) = targets::TARGETS.iter().find(|t| t.0 == name).expect("a target of this name");
    let files = corpus(name);
    assert!(files.len() >= 10, "{name}: {} files", files.len());
    for file in files {
        let data = std::fs::read(&file).expect("readable");
        // Said on standard error only where the body panics.
        println!("{}", file.display());
        body(&data);
        // Cut anywhere it is another input.
        for cut in [data.len() / 3, data.len() / 2, data.len().saturating_sub(1)] {
            body(&data[..cut]);
        }
    }
}

#[test]
fn decode_any() {
    run("decode_any");
}

#[test]
fn roundtrip() {
    run("roundtrip");
}

#[test]
fn event_list() {
    run("event_list");
}

#[test]
fn index_dump() {
    run("index_dump");
}

#[test]
fn stream() {
    run("stream");
}

#[test]
fn index_ops() {
    run("index_ops");
}

#[test]
fn every_target_has_a_corpus_and_every_corpus_a_target() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../fuzz");
    let names = |of: &str| {
        let list = std::fs::read_dir(folder.join(of)).expect("a folder");
        let mut names: Vec<String> = list
            .map(|e| e.expect("readable").path().file_stem().expect("a name").to_string_lossy().into_owned())
            .collect();
        names.sort();
        names
    };
    let mut wanted: Vec<&str> = targets::TARGETS.iter().map(|t| t.0).collect();
    wanted.sort_unstable();
    assert_eq!(names("corpus"), wanted);
    assert_eq!(names("fuzz_targets"), wanted);
}
