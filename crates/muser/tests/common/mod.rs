//! Running the binary.
#![allow(dead_code, clippy::unwrap_used)]

use std::io::Write;
use std::path::PathBuf;
use std::process::{Command, Stdio};

/// What a run left.
pub struct Ran {
    pub out: String,
    pub err: String,
    pub code: i32,
}

impl Ran {
    /// Standard output of a run that must have succeeded.
    pub fn ok(self) -> String {
        assert_eq!(self.code, 0, "{}", self.err);
        self.out
    }

    /// Standard output as one JSON value.
    pub fn json(self) -> serde_json::Value {
        serde_json::from_str(&self.ok()).unwrap()
    }

    /// Standard output as JSON lines.
    pub fn json_lines(self) -> Vec<serde_json::Value> {
        self.ok().lines().map(|line| serde_json::from_str(line).unwrap()).collect()
    }

    /// The message of a run that must have failed with `code`: one error, no panic, no output.
    pub fn error(self, code: i32) -> String {
        assert_eq!(self.code, code, "{}{}", self.out, self.err);
        assert!(!self.err.contains("panicked"), "{}", self.err);
        assert_eq!(self.err.matches("error:").count(), 1, "{}", self.err);
        self.err
    }
}

/// Runs `muser ARGS` with this standard input.
pub fn muser_with(input: &[u8], args: &[&str]) -> Ran {
    let mut child =
        command(args).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let mut stdin = child.stdin.take().unwrap();
    let input = input.to_vec();
    // A program that fails early closes its input: that is no failure of the test.
    let writer = std::thread::spawn(move || stdin.write_all(&input));
    let output = child.wait_with_output().unwrap();
    let _ = writer.join().unwrap();
    Ran {
        out: String::from_utf8(output.stdout).unwrap(),
        err: String::from_utf8(output.stderr).unwrap(),
        code: output.status.code().unwrap(),
    }
}

/// Runs `muser ARGS` with empty standard input.
pub fn muser(args: &[&str]) -> Ran {
    muser_with(b"", args)
}

/// The command, from a folder without a models/ of its own, and without the user's settings.
pub fn command(args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_muser"));
    command.args(args).current_dir(std::env::temp_dir()).env_remove("MUSER_MODEL").env_remove("NO_COLOR");
    command
}

/// A file of tests/fixtures.
pub fn fixture(name: &str) -> String {
    muser_testkit::fixture(name).to_str().unwrap().to_string()
}

/// The tiny model, whose Q8_0 file is lossless.
pub fn tiny() -> String {
    fixture("gguf/tiny-Q8_0.gguf")
}

/// Lines of a JSON lines fixture.
pub fn lines(name: &str) -> Vec<serde_json::Value> {
    let text = std::fs::read_to_string(fixture(name)).unwrap();
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

/// A file in the system's temporary folder that goes away with the value.
pub struct Temp(pub PathBuf);

impl Temp {
    pub fn new(name: &str) -> Self {
        Temp(std::env::temp_dir().join(format!("muser-test-{}-{name}", std::process::id())))
    }
    pub fn with(name: &str, content: impl AsRef<[u8]>) -> Self {
        let temp = Temp::new(name);
        std::fs::write(&temp.0, content).unwrap();
        temp
    }
    pub fn path(&self) -> &str {
        self.0.to_str().unwrap()
    }
}

impl Drop for Temp {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}
