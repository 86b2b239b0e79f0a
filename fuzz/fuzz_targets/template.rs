//! A request's `{"messages", "tools", "kwargs"}` through the model's template; input that is no JSON is compiled as a template.

#![no_main]

use libfuzzer_sys::fuzz_target;
use muser_text::{ChatTemplate, messages::normalize};
use serde_json::Value;
use std::sync::LazyLock;

static TEMPLATE: LazyLock<ChatTemplate> = LazyLock::new(|| {
    let source = include_str!("../../tests/fixtures/chat/muse-glimmer.jinja");
    ChatTemplate::new(source, "<|begin_of_text|>").expect("the model's template compiles")
});

fuzz_target!(|bytes: &[u8]| {
    let Ok(request) = serde_json::from_slice::<Value>(bytes) else {
        let _ = ChatTemplate::new(&String::from_utf8_lossy(bytes), "");
        return;
    };
    let kwargs = request.get("kwargs").and_then(Value::as_object).cloned().unwrap_or_default();
    let Some(messages) = request.get("messages") else { return };
    // As they come, and as a server passes them on.
    let _ = TEMPLATE.render(messages, request.get("tools"), &kwargs);
    if let Ok((messages, tools)) = normalize(messages, request.get("tools")) {
        let _ = TEMPLATE.render(&messages, tools.as_ref(), &kwargs);
    }
});
