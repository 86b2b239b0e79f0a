//! Environment variables that muser and its libraries read while it runs on the CPU are those that `muser docs lanes` lists.
#![cfg(target_os = "linux")]
#![allow(clippy::unwrap_used)]

mod common;

use common::{Temp, muser, tiny};
use std::collections::BTreeSet;
use std::io::{BufRead, BufReader};
use std::process::{Command, Stdio};

/// Stands before the C library's function and writes down what muser asks for.
const GETENV: &str = r#"
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <unistd.h>
char* getenv(const char* name) {
    char line[256];
    size_t n = strnlen(name, sizeof line - 1);
    memcpy(line, name, n);
    line[n] = '\n';
    int log = strcmp(program_invocation_short_name, "muser") ? -1 : open(LOG, O_WRONLY | O_CREAT | O_APPEND, 0600);
    if (log >= 0 && write(log, line, n + 1) >= 0) close(log);
    char* (*next)(const char*) = (char* (*)(const char*))dlsym(RTLD_NEXT, "getenv");
    return next(name);
}
"#;

#[test]
fn no_variable_is_read_that_is_not_listed() {
    let page = muser(&["docs", "lanes"]).ok();
    let (_, table) = page.split_once("## Environment variables").unwrap();
    let cells = table.lines().filter_map(|line| line.strip_prefix("| ")?.split(" | ").next());
    let listed: BTreeSet<&str> = cells.flat_map(|cell| cell.split(", ")).map(str::trim).collect();

    let source = Temp::with("getenv.c", GETENV);
    let (library, log) = (Temp::new("getenv.so"), Temp::new("getenv.log"));
    let define = format!("-DLOG=\"{}\"", log.path());
    let built = Command::new("cc")
        .args(["-shared", "-fPIC", &define, "-o", library.path(), source.path(), "-ldl"])
        .output()
        .expect("cc is needed, which links Rust programs");
    assert!(built.status.success(), "{}", String::from_utf8_lossy(&built.stderr));

    let program = env!("CARGO_BIN_EXE_muser");
    let watched = |program: &str, args: &[&str]| {
        let mut command = Command::new(program);
        command.args(args).env("LD_PRELOAD", library.path()).env_remove("MUSER_MODEL");
        command.stdout(Stdio::piped()).stderr(Stdio::null());
        command
    };
    let model = tiny();
    assert!(
        watched(program, &["run", "-m", &model, "--device", "cpu", "-n", "2", "hi"])
            .status()
            .unwrap()
            .success()
    );
    let mut server =
        watched(program, &["serve", "-m", &model, "--device", "cpu", "--port", "0"]).spawn().unwrap();
    let mut line = String::new();
    BufReader::new(server.stdout.take().unwrap()).read_line(&mut line).unwrap();
    server.kill().unwrap();
    server.wait().unwrap();
    assert!(line.starts_with("listening"), "{line}");
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/terminal/chat.py");
    let chat =
        [script, program, "chat", "--device", "cpu", "--lane", "strict", "--draft", "off", "--temp", "0"];
    let chat = [&chat[..], &["--think", "low"]].concat();
    assert!(watched("python3", &chat).status().unwrap().success());

    let log = std::fs::read_to_string(log.path()).unwrap();
    let read: BTreeSet<&str> = log.lines().collect();
    for seen in ["MUSER_MODEL", "MUSER_API_KEY", "TERM", "NO_COLOR"] {
        assert!(read.contains(seen), "the reading of {seen} was not seen: {read:?}");
    }
    let unlisted: Vec<_> = read.difference(&listed).collect();
    assert!(unlisted.is_empty(), "docs.rs does not list {unlisted:?}");
}
