//! The chat on a pseudo-terminal, which Python's standard library makes.
#![allow(clippy::unwrap_used)]

use std::process::Command;

#[test]
fn a_chat_answers_stops_at_ctrl_c_and_ends_at_quit() {
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/terminal/chat.py");
    // The strict lane is slow enough to be interrupted.
    let chat =
        ["chat", "--device", "cpu", "--lane", "strict", "--draft", "off", "--temp", "0", "--think", "low"];
    let output = Command::new("python3")
        .args([script, env!("CARGO_BIN_EXE_muser")])
        .args(chat)
        .env_remove("MUSER_MODEL")
        .output()
        .expect("python3 is needed");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}
