//! Byte-pair merging of one piece: always the pair of lowest rank, the leftmost among equals.
//!
//! A heap of candidates over a linked list makes a piece of n bytes n log n. The crates that we looked at (tokenizers,
//! tiktoken-rs, kitoken, bpe) either merge long pieces in quadratic time, split by a backtracking regex that is quadratic
//! on runs of spaces, or don't load from GGUF's merges; this is short, exact and needs none of them.

use hashbrown::HashMap;
use std::cmp::Reverse;
use std::collections::BinaryHeap;

/// No node, no merge; also the id of a node that was merged into the one before it.
const NONE: u32 = u32::MAX;
/// Longest piece that positions of 32 bits can address; longer ones (a 4 GiB run) are cut.
const MAX_PIECE: usize = NONE as usize;

/// The merges of a vocabulary.
pub(crate) struct Bpe {
    /// Token of each single byte.
    of_byte: [u32; 256],
    /// (left, right) to (rank, merged).
    merges: HashMap<(u32, u32), (u32, u32)>,
}

/// A token of the piece being merged, with the merge of it and the next.
#[derive(Clone, Copy)]
struct Node {
    id: u32,
    prev: u32,
    next: u32,
    rank: u32,
    merged: u32,
}

/// Buffers that are kept from piece to piece.
#[derive(Default)]
pub(crate) struct Scratch {
    nodes: Vec<Node>,
    /// Rank above position, in one number.
    heap: BinaryHeap<Reverse<u64>>,
}

impl Bpe {
    /// `of_byte` names the token of each byte; of `merges`, (left, right, merged) in order of rank, the first of a pair counts.
    pub(crate) fn new(of_byte: [u32; 256], merges: impl Iterator<Item = (u32, u32, u32)>) -> Self {
        let mut all = HashMap::with_capacity(merges.size_hint().0);
        for (rank, (left, right, merged)) in (0..NONE).zip(merges) {
            all.entry((left, right)).or_insert((rank, merged));
        }
        Bpe { of_byte, merges: all }
    }

    /// Appends the tokens of `piece` to `ids`.
    pub(crate) fn encode(&self, piece: &[u8], scratch: &mut Scratch, ids: &mut Vec<u32>) {
        piece.chunks(MAX_PIECE).for_each(|part| self.encode_part(part, scratch, ids));
    }

    fn encode_part(&self, piece: &[u8], scratch: &mut Scratch, ids: &mut Vec<u32>) {
        let Scratch { nodes, heap } = scratch;
        let last = piece.len().saturating_sub(1) as u32;
        nodes.clear();
        heap.clear();
        nodes.extend((0u32..).zip(piece).map(|(i, byte)| Node {
            id: self.of_byte[*byte as usize],
            prev: i.wrapping_sub(1),
            next: if i == last { NONE } else { i + 1 },
            rank: NONE,
            merged: NONE,
        }));
        for i in 0..last {
            self.offer(nodes, heap, i);
        }
        while let Some(Reverse(key)) = heap.pop() {
            let (rank, at) = ((key >> 32) as u32, key as u32);
            let node = nodes[at as usize];
            // Stale: this token or the next was merged since.
            if node.id == NONE || node.rank != rank {
                continue;
            }
            let after = nodes[node.next as usize].next;
            nodes[node.next as usize].id = NONE;
            nodes[at as usize] = Node { id: node.merged, next: after, ..node };
            self.offer(nodes, heap, at);
            if after != NONE {
                nodes[after as usize].prev = at;
            }
            if node.prev != NONE {
                self.offer(nodes, heap, node.prev);
            }
        }
        ids.extend(nodes.iter().map(|node| node.id).filter(|id| *id != NONE));
    }

    /// Looks up the merge of the token at `at` with the next one, and queues it.
    fn offer(&self, nodes: &mut [Node], heap: &mut BinaryHeap<Reverse<u64>>, at: u32) {
        let node = nodes[at as usize];
        let next = nodes.get(node.next as usize).map(|next| next.id);
        let found = next.and_then(|next| self.merges.get(&(node.id, next))).copied();
        let (rank, merged) = found.unwrap_or((NONE, NONE));
        nodes[at as usize] = Node { rank, merged, ..node };
        if found.is_some() {
            heap.push(Reverse(u64::from(rank) << 32 | u64::from(at)));
        }
    }
}
