//! Worker threads that take numbered units of one job at a time: spin between jobs, park when idle.
//!
//! The caller works too. Units are claimed one by one, so a core that somebody else uses takes fewer; and the caller
//! waits only for workers that have entered the job, never for one that the system has not scheduled.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU64, AtomicUsize, Ordering::*};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// How long a worker looks for the next job before it parks: longer than any gap inside a pass, shorter than a pass.
const SPIN: Duration = Duration::from_micros(100);
/// Looks at the state between two glances at the clock.
const LOOKS: u32 = 64;

/// A job: a function of consecutive units.
type Job<'a> = &'a (dyn Fn(Range<usize>) + Sync);

/// State word: epoch in the upper half, then one bit "open", then the number of workers inside.
const OPEN: u64 = 1 << 31;
const INSIDE: u64 = OPEN - 1;

struct Shared {
    state: AtomicU64,
    next: AtomicUsize,
    units: AtomicUsize,
    /// Most units of one claim.
    most: AtomicUsize,
    /// Points at a `Job` on the stack of `Pool::run` while a job is open or a worker inside.
    job: AtomicPtr<()>,
    parked: AtomicUsize,
    stop: AtomicBool,
    failed: AtomicBool,
}

/// Threads, the caller's included.
pub struct Pool {
    shared: Arc<Shared>,
    workers: Vec<JoinHandle<()>>,
}

impl Pool {
    /// `threads` in all; one means that the caller works alone.
    pub fn new(threads: usize) -> std::io::Result<Self> {
        let shared = Arc::new(Shared {
            state: AtomicU64::new(0),
            next: AtomicUsize::new(0),
            units: AtomicUsize::new(0),
            most: AtomicUsize::new(1),
            job: AtomicPtr::new(std::ptr::null_mut()),
            parked: AtomicUsize::new(0),
            stop: AtomicBool::new(false),
            failed: AtomicBool::new(false),
        });
        let spawn = |i: usize| {
            let shared = shared.clone();
            std::thread::Builder::new().name(format!("muser-cpu-{i}")).spawn(move || shared.work(threads))
        };
        let workers = (1..threads).map(spawn).collect::<Result<_, _>>()?;
        Ok(Pool { shared, workers })
    }

    /// Threads, the caller's included.
    pub fn threads(&self) -> usize {
        self.workers.len() + 1
    }

    /// Calls `f` once for each unit below `units`, on all threads, and returns when all calls have returned.
    pub fn run(&self, units: usize, f: impl Fn(usize) + Sync) {
        self.run_runs(units, 1, |run| run.for_each(&f));
    }

    /// Calls `f` with runs of at most `most` consecutive units that together are all below `units`, each once. Runs
    /// shrink towards the end, so that threads finish together.
    pub fn run_runs(&self, units: usize, most: usize, f: impl Fn(Range<usize>) + Sync) {
        if units == 0 {
            return;
        }
        if units == 1 || self.workers.is_empty() {
            f(0..units);
            return;
        }
        let shared = &*self.shared;
        let job: Job<'_> = &f;
        shared.job.store((&raw const job).cast_mut().cast(), Relaxed);
        shared.next.store(0, Relaxed);
        shared.units.store(units, Relaxed);
        shared.most.store(most.max(1), Relaxed);
        let epoch = (shared.state.load(Relaxed) >> 32).wrapping_add(1);
        {
            let _leave = Leave(shared);
            shared.state.store(epoch << 32 | OPEN, SeqCst);
            if shared.parked.load(SeqCst) > 0 {
                self.workers.iter().for_each(|w| w.thread().unpark());
            }
            shared.take_units(job, self.threads());
        }
        if shared.failed.swap(false, Relaxed) {
            panic!("a worker thread of the CPU device panicked; its message stands above");
        }
    }
}

/// Closes a job and waits for the workers inside it, also when the caller's own share panics.
struct Leave<'a>(&'a Shared);

impl Drop for Leave<'_> {
    fn drop(&mut self) {
        self.0.next.store(usize::MAX / 2, Relaxed);
        self.0.state.fetch_and(!OPEN, AcqRel);
        let mut looks = 0u32;
        while self.0.state.load(Acquire) & INSIDE != 0 {
            looks += 1;
            // A worker that stays away this long is not running: leave it the core.
            if looks > 20_000 { std::thread::yield_now() } else { std::hint::spin_loop() }
        }
    }
}

impl Shared {
    fn take_units(&self, f: Job<'_>, threads: usize) {
        let (units, most) = (self.units.load(Relaxed), self.most.load(Relaxed));
        let share = |left: usize| (left / (2 * threads)).clamp(1, most).min(left);
        let claim = |at: usize| (at < units).then(|| at + share(units - at));
        while let Ok(at) = self.next.fetch_update(Relaxed, Relaxed, claim) {
            f(at..at + share(units - at));
        }
    }

    fn work(&self, threads: usize) {
        let mut seen = 0;
        loop {
            let Some(epoch) = self.wait(seen) else { return };
            seen = epoch;
            // Enter, unless the job has been closed meanwhile.
            let enter = |s: u64| (s >> 32 == epoch && s & OPEN != 0).then_some(s + 1);
            if self.state.fetch_update(AcqRel, Relaxed, enter).is_err() {
                continue;
            }
            // SAFETY: this worker is counted inside, so `Leave` still waits in `Pool::run`, where the job lives; the job
            // was stored before the epoch that was just entered.
            let job: Job<'_> = unsafe { *self.job.load(Relaxed).cast::<Job<'_>>() };
            let done =
                std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| self.take_units(job, threads)));
            if done.is_err() {
                self.failed.store(true, Relaxed);
            }
            self.state.fetch_sub(1, AcqRel);
        }
    }

    /// The epoch of an open job that is not `seen`; none when the pool ends.
    fn wait(&self, seen: u64) -> Option<u64> {
        let mut since = Instant::now();
        let new_job = |s: u64| (s & OPEN != 0 && s >> 32 != seen).then_some(s >> 32);
        loop {
            for _ in 0..LOOKS {
                if let Some(epoch) = new_job(self.state.load(Acquire)) {
                    return Some(epoch);
                }
                std::hint::spin_loop();
            }
            if self.stop.load(Acquire) {
                return None;
            }
            if since.elapsed() > SPIN {
                self.parked.fetch_add(1, SeqCst);
                if new_job(self.state.load(SeqCst)).is_none() && !self.stop.load(SeqCst) {
                    std::thread::park();
                }
                self.parked.fetch_sub(1, SeqCst);
                since = Instant::now();
            }
        }
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.shared.stop.store(true, SeqCst);
        for worker in self.workers.drain(..) {
            worker.thread().unpark();
            // A worker catches its own panics.
            let _ = worker.join();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::AtomicU32;

    #[test]
    fn every_unit_runs_once() {
        for threads in [1, 2, 5] {
            let pool = Pool::new(threads).unwrap();
            for round in 0..300 {
                let hits: Vec<AtomicU32> = (0..round % 40).map(|_| AtomicU32::new(0)).collect();
                pool.run(hits.len(), |i| {
                    hits[i].fetch_add(1, Relaxed);
                });
                pool.run_runs(hits.len(), 7, |run| {
                    assert!(run.len() <= 7 || threads == 1);
                    run.for_each(|i| {
                        hits[i].fetch_add(1, Relaxed);
                    });
                });
                assert!(hits.iter().all(|h| h.load(Relaxed) == 2), "threads {threads}, round {round}");
                if round % 100 == 99 {
                    std::thread::sleep(Duration::from_millis(1));
                }
            }
        }
    }

    #[test]
    fn a_panic_reaches_the_caller_and_the_pool_goes_on() {
        let pool = Pool::new(3).unwrap();
        let bad =
            std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| pool.run(64, |i| assert_ne!(i, 7))));
        assert!(bad.is_err());
        let count = AtomicU32::new(0);
        pool.run(64, |_| {
            count.fetch_add(1, Relaxed);
        });
        assert_eq!(count.load(Relaxed), 64);
    }
}
