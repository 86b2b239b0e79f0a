//! What bodies may cost: bytes that have come in, and the memory that reading them takes, each within a bound of its own.
//!
//! A body of small objects takes a hundred times its length once it is read, copied into the template's form and rendered.
//! So each body is given its highest cost before it is parsed, and waits, or is refused, where the sum would be too much.

use crate::error::{ApiError, Kind};
use axum::body::{Body, HttpBody};
use std::sync::{Arc, Mutex};
use std::time::Duration;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio_stream::StreamExt;

/// A body must have come by then.
const BODY_TIME: Duration = Duration::from_secs(60);
/// How long a body that has come waits to be read.
const TURN_TIME: Duration = Duration::from_secs(10);

/// Of each body this much is received whatever else there is; the number of connections bounds it.
const SMALL: usize = 64 << 10;
/// A byte that has come in: a growing buffer is up to three times as large for a moment.
const PER_RECEIVED: usize = 3;
/// A byte of a body while it is read: it may be a token of its own.
const PER_BYTE: usize = 48;
/// A comma or colon besides: the element of an array, or the key of an object, exists up to five times.
const PER_ENTRY: usize = 320;
/// A bracket besides: the same for an array or object, which takes some hundred bytes.
const PER_BRACKET: usize = 1536;
/// Of that, what a request keeps while it waits and runs: its tokens, its tools.
const KEPT: usize = 4;
/// Bytes of a permit.
const UNIT: usize = 1024;

/// Highest cost of reading a body, in bytes of memory. What stands in strings counts too: it may be JSON.
pub fn cost(body: &[u8]) -> usize {
    let of = |byte: &u8| match byte {
        b',' | b':' => PER_BYTE + PER_ENTRY,
        b'[' | b'{' => PER_BYTE + PER_BRACKET,
        _ => PER_BYTE,
    };
    body.iter().map(of).sum()
}

/// Bounds what all bodies cost together.
pub struct Intake {
    limit: usize,
    arriving: Arc<Semaphore>,
    /// Permits of `arriving` in all.
    gate: usize,
    reading: Arc<Semaphore>,
    /// Permits of `reading` in all.
    room: usize,
}

/// A body's share of the memory, given back when it is dropped.
#[derive(Debug)]
pub struct Share {
    permit: Mutex<OwnedSemaphorePermit>,
    /// Permits that stay.
    kept: usize,
}

impl Share {
    /// Gives back what only reading took; once, though a request of several prompts says so for each.
    pub fn settle(&self) {
        let mut permit = self.permit.lock().unwrap_or_else(|e| e.into_inner());
        let freed = permit.num_permits().saturating_sub(self.kept);
        drop(permit.split(freed));
    }
}

/// A body that may be read.
pub struct Received {
    /// The body.
    pub bytes: Vec<u8>,
    /// To be kept for as long as anything of the body is.
    pub share: Arc<Share>,
    _arrived: Option<OwnedSemaphorePermit>,
}

impl Intake {
    /// Bodies of at most `limit` bytes, and `memory` bytes for all: a quarter for what comes in, the rest for reading.
    pub fn new(limit: usize, memory: usize) -> Self {
        let permits = |bytes: usize| (bytes / UNIT).min(Semaphore::MAX_PERMITS).min(u32::MAX as usize);
        let gate = permits(memory / 4);
        let room = permits(memory) - gate;
        let (arriving, reading) = (Arc::new(Semaphore::new(gate)), Arc::new(Semaphore::new(room)));
        Intake { limit, arriving, gate, reading, room }
    }

    /// Receives a body, and waits until there is memory for reading it.
    pub async fn take(&self, body: Body) -> Result<Received, ApiError> {
        let received = tokio::time::timeout(BODY_TIME, self.receive(body)).await;
        let late = || ApiError::new(Kind::Timeout, "the body did not come within 60 seconds");
        let (bytes, arrived) = received.map_err(|_| late())??;
        let permits = cost(&bytes).div_ceil(UNIT);
        if permits > self.room {
            return Err(never("reading", permits, self.room));
        }
        let turn = self.reading.clone().acquire_many_owned(permits as u32);
        let Ok(Ok(permit)) = tokio::time::timeout(TURN_TIME, turn).await else {
            let why = "other requests take all the memory there is for bodies; try again in a moment";
            return Err(ApiError::new(Kind::Busy, why));
        };
        let share = Arc::new(Share { permit: Mutex::new(permit), kept: permits.div_ceil(KEPT) });
        Ok(Received { bytes, share, _arrived: arrived })
    }

    async fn receive(&self, body: Body) -> Result<(Vec<u8>, Option<OwnedSemaphorePermit>), ApiError> {
        let limit = self.limit;
        let large = || {
            let message = format!("the body is larger than {limit} bytes; send less, or raise --body-limit");
            ApiError::new(Kind::TooLarge, message)
        };
        if body.size_hint().lower() > limit as u64 {
            return Err(large());
        }
        let mut stream = body.into_data_stream();
        let (mut bytes, mut held) = (vec![], None::<OwnedSemaphorePermit>);
        while let Some(chunk) = stream.next().await {
            let chunk = chunk.map_err(|_| ApiError::new(Kind::Invalid, "the body was cut off"))?;
            let len = bytes.len() + chunk.len();
            if len > limit {
                return Err(large());
            }
            let due = (len.saturating_sub(SMALL) * PER_RECEIVED).div_ceil(UNIT);
            if due > self.gate {
                return Err(never("receiving", due, self.gate));
            }
            let more = due - held.as_ref().map_or(0, OwnedSemaphorePermit::num_permits);
            if more > 0 {
                let Ok(permit) = self.arriving.clone().try_acquire_many_owned(more as u32) else {
                    let why = "too many large bodies are coming in; try again in a moment";
                    return Err(ApiError::new(Kind::Busy, why));
                };
                match &mut held {
                    Some(held) => held.merge(permit),
                    None => held = Some(permit),
                }
            }
            bytes.extend_from_slice(&chunk);
        }
        Ok((bytes, held))
    }
}

/// A body that no waiting helps.
fn never(what: &str, due: usize, all: usize) -> ApiError {
    let (due, all) = ((due * UNIT) >> 20, (all * UNIT) >> 20);
    let message = format!(
        "{what} the body may take {due} MiB of memory, and {all} are allowed; send less, or raise --body-memory"
    );
    ApiError::new(Kind::TooLarge, message)
}

#[cfg(test)]
mod tests {
    use super::*;
    use axum::body::Bytes;
    use tokio::sync::mpsc::{UnboundedSender, unbounded_channel};
    use tokio_stream::wrappers::UnboundedReceiverStream;

    type Sender = UnboundedSender<Result<Bytes, std::io::Error>>;

    /// A body that comes in as it is sent.
    fn body() -> (Sender, Body) {
        let (sender, receiver) = unbounded_channel();
        (sender, Body::from_stream(UnboundedReceiverStream::new(receiver)))
    }

    fn whole(bytes: usize) -> Body {
        Body::from("x".repeat(bytes))
    }

    fn refusal(result: Result<Received, ApiError>) -> Kind {
        result.map(|received| received.bytes.len()).expect_err("a refusal").kind
    }

    #[tokio::test]
    async fn large_bodies_that_come_slowly_leave_room_for_small_ones() {
        // A quarter, 1 MiB, is for what comes in: 341 KiB beyond each body's first 64.
        let intake = Arc::new(Intake::new(1 << 20, 4 << 20));
        let (sender, slow) = body();
        let taking = tokio::spawn({
            let intake = intake.clone();
            async move { intake.take(slow).await }
        });
        sender.send(Ok(vec![b'x'; 300 << 10].into())).unwrap();
        while intake.arriving.available_permits() == 1024 {
            tokio::task::yield_now().await;
        }
        assert_eq!(refusal(intake.take(whole(200 << 10)).await), Kind::Busy);
        assert_eq!(intake.take(whole(SMALL)).await.unwrap().bytes.len(), SMALL);
        drop(sender);
        assert_eq!(refusal(taking.await.unwrap()), Kind::TooLarge, "300 KiB of text may take 14 MiB");
        assert_eq!((intake.arriving.available_permits(), intake.reading.available_permits()), (1024, 3072));
    }

    #[tokio::test(start_paused = true)]
    async fn bodies_wait_for_their_turn_and_then_are_refused() {
        let intake = Intake::new(1 << 20, 4 << 20);
        let text = 40 << 10;
        let first = intake.take(whole(text)).await.unwrap();
        assert_eq!(intake.reading.available_permits(), 3072 - 1920);
        // The clock runs where nothing else does.
        assert_eq!(refusal(intake.take(whole(text)).await), Kind::Busy);
        // Each prompt of a request settles its share.
        first.share.settle();
        first.share.settle();
        assert_eq!(intake.reading.available_permits(), 3072 - 480);
        let second = intake.take(whole(text)).await.unwrap();
        drop((first, second));
        assert_eq!(intake.reading.available_permits(), 3072);
    }

    #[tokio::test]
    async fn bodies_that_never_fit_are_refused_before_they_come() {
        let intake = Intake::new(1000, 4 << 20);
        assert_eq!(refusal(intake.take(whole(1001)).await), Kind::TooLarge);
        let (sender, long) = body();
        (0..2).for_each(|_| sender.send(Ok(vec![b'x'; 501].into())).unwrap());
        // It is not at its end.
        assert_eq!(refusal(intake.take(long).await), Kind::TooLarge);
        // 500 KiB take 1.3 MiB of the 1 that is for what comes in, whoever else is there.
        let intake = Intake::new(1 << 20, 4 << 20);
        assert_eq!(refusal(intake.take(whole(500 << 10)).await), Kind::TooLarge);
        let (sender, cut) = body();
        sender.send(Err(std::io::ErrorKind::ConnectionReset.into())).unwrap();
        assert_eq!(refusal(intake.take(cut).await), Kind::Invalid);
    }
}
