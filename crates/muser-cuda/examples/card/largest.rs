//! The largest logits that the card finds, beside a reading of all.

use crate::{Patched, rows, run, tiny_geometry};
use muser_core::model::{QuantMix, Synthetic, Weights};
use muser_core::sample::TokenMask;
use muser_core::{Device, Geometry, Kind, Lane, Model, Net, Pass, Slot};
use muser_cuda::{CudaDevice, CudaOptions};
use std::collections::HashMap;
use std::sync::Arc;

/// Rows and masks that are looked at.
const ALL: usize = 24 * 5;

/// Rows of many spans, the last of them short. Where a weight is no number the serving lane refuses to load, and nothing is found of what
/// the strict lane computes.
pub fn largest() -> bool {
    let g = Geometry { vocab: 40_007, ..tiny_geometry() };
    let synthetic = || Synthetic::new(Net::Target, g.clone(), 0, QuantMix::from_name("bf16").unwrap(), 3);
    let head = Slot { net: Net::Target, layer: 0, kind: Kind::Output };
    let mut not_a_number = synthetic().get(head).unwrap().data.to_vec();
    not_a_number[20_000 * g.hidden * 2..][..2].copy_from_slice(&[0xc0, 0x7f]);
    let load = |broken: bool, lane| {
        let changed = broken.then(|| (head, not_a_number.clone()));
        let weights = Patched(synthetic(), changed.into_iter().collect::<HashMap<_, _>>());
        let model = Arc::new(Model::new(g.clone(), Box::new(weights), None).unwrap());
        let options = CudaOptions { lane, max_rows: Some(32), ..CudaOptions::default() };
        CudaDevice::load(model, &options, &mut |_, _| {})
    };
    let lanes = [(false, Lane::Serving), (false, Lane::Strict), (true, Lane::Strict)];
    let found = lanes.map(|(broken, lane)| found(&mut load(broken, lane).unwrap(), g.vocab));
    let refused = load(true, Lane::Serving).err().map_or(String::new(), |e| e.to_string());
    println!(
        "largest logits, right and found of {ALL} rows and masks: {found:?}; where one is no number: {refused}"
    );
    // Of 1,500 tokens near each other all reach the floor, for they are in few spans: more than there is room for.
    let most = (24 * 4, 24 * 4);
    found == [most, most, (0, 0)] && refused.contains("damaged")
}

/// How often what the card finds is right, and how often it finds something.
fn found(cuda: &mut CudaDevice, vocab: usize) -> (usize, usize) {
    let seq = cuda.open(64).unwrap();
    let mut found = (0, 0);
    for (first, n) in [(0, 1), (1, 3), (4, 20)] {
        let logits = run(cuda, Pass::Target, &rows(seq, first, &[5; 20][..n], true));
        for (i, row) in logits.chunks_exact(vocab).enumerate() {
            // All tokens, all but a few, some near each other, one, none.
            let allowed: [&dyn Fn(u32) -> bool; ALL / 24] =
                [&|_| true, &|t| t % 7 > 0, &|t| t / 1500 == 3, &|t| t == 40_006, &|_| false];
            for (m, allowed) in allowed.into_iter().enumerate() {
                let mut mask = TokenMask::none(vocab);
                (0..vocab as u32).filter(|t| allowed(*t)).for_each(|t| mask.allow(t));
                let Some(got) = cuda.largest(i, 100, Some(&mask).filter(|_| m > 0)).unwrap() else {
                    continue;
                };
                let reaches = |t: &u32| allowed(*t) && row[*t as usize] >= got.floor;
                let want = (0..vocab as u32).filter(reaches).map(|t| (t, row[t as usize]));
                let mut tokens = got.tokens.to_vec();
                tokens.sort_by_key(|t| t.0);
                let enough = tokens.len() >= 100 || got.floor == f32::NEG_INFINITY;
                found.0 += usize::from(enough && want.eq(tokens));
                found.1 += 1;
            }
        }
    }
    cuda.close(seq);
    found
}
