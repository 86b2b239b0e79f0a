//! The way of outputs from the engine's thread to their generations.
//!
//! Waking a task from outside the runtime is a call into the system. For a group of sixteen these were a twentieth of a step,
//! so the engine's thread wakes one task a step, and that one hands out what has come.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use tokio::sync::Notify;
use tokio::sync::mpsc::UnboundedSender;

/// Takes messages in until they are sent together. Copies share it; the last one's end ends the task.
#[derive(Clone)]
pub struct Post<T>(Arc<Office<T>>);

struct Office<T> {
    held: Arc<Held<T>>,
}

struct Held<T> {
    messages: Mutex<Vec<(UnboundedSender<T>, T)>>,
    due: AtomicBool,
    closed: AtomicBool,
    wake: Notify,
}

impl<T> Held<T> {
    fn take(&self) -> Vec<(UnboundedSender<T>, T)> {
        std::mem::take(&mut self.messages.lock().unwrap_or_else(|e| e.into_inner()))
    }
}

impl<T> Drop for Office<T> {
    fn drop(&mut self) {
        self.held.closed.store(true, Ordering::Release);
        self.held.wake.notify_one();
    }
}

impl<T: Send + 'static> Post<T> {
    /// Starts the task that hands out; to be called within the runtime.
    pub(crate) fn open() -> Self {
        let held = Arc::new(Held {
            messages: Mutex::new(vec![]),
            due: AtomicBool::new(false),
            closed: AtomicBool::new(false),
            wake: Notify::new(),
        });
        let office = Office { held: held.clone() };
        tokio::spawn(async move {
            loop {
                let closed = held.closed.load(Ordering::Acquire);
                for (to, message) in held.take() {
                    // Who is gone wants nothing.
                    let _ = to.send(message);
                }
                if closed {
                    return;
                }
                held.wake.notified().await;
            }
        });
        Post(Arc::new(office))
    }

    /// Takes a message in.
    pub(crate) fn put(&self, to: &UnboundedSender<T>, message: T) {
        let held = &self.0.held;
        held.messages.lock().unwrap_or_else(|e| e.into_inner()).push((to.clone(), message));
        held.due.store(true, Ordering::Release);
    }

    /// Sends what has been taken in.
    pub(crate) fn send(&self) {
        if self.0.held.due.swap(false, Ordering::AcqRel) {
            self.0.held.wake.notify_one();
        }
    }
}
