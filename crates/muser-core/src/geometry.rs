//! Every number of the model, read from the file's metadata. Nothing here is a constant of one checkpoint.

/// How far a layer looks back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LayerKind {
    /// Sliding window with rotary positions; KV lives in a ring.
    Local,
    /// Every earlier position, no positional encoding; KV lives in a growing plane.
    Full,
}

/// How a head's elements are paired for rotation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RopePairs {
    /// (0,1), (2,3), ...: the target in GGUF files (Q and K rows un-permuted).
    Interleaved,
    /// (0, d/2), (1, d/2+1), ...: the drafter, and the target in Hugging Face files.
    Halves,
}

/// The shape of one network: the target, or the drafter (whose vocabulary and embedding are the target's).
#[derive(Clone, Debug, PartialEq)]
pub struct Geometry {
    /// One entry a layer (`block_count`, `attention.sliding_window_pattern`).
    pub layers: Vec<LayerKind>,
    /// Width of the residual stream (`embedding_length`).
    pub hidden: usize,
    /// Width of the SwiGLU (`feed_forward_length`).
    pub ff: usize,
    /// Query heads (`attention.head_count`).
    pub heads: usize,
    /// Key and value heads (`attention.head_count_kv`).
    pub kv_heads: usize,
    /// Elements of a head (`attention.key_length`, equal to `attention.value_length`).
    pub head_dim: usize,
    /// Rows of the embedding and of the head.
    pub vocab: usize,
    /// Longest sequence that the file promises (`context_length`).
    pub context: usize,
    /// A local layer at position p sees p-window+1 ..= p (`attention.sliding_window`).
    pub window: usize,
    /// Epsilon of every norm before a block, of QK-norm and of the final norm (`attention.layer_norm_rms_epsilon`).
    pub norm_eps: f32,
    /// Epsilon of the norms after a block: 1e-8, a constant of the architecture that no file states
    /// (transformers, `MuseGlimmerDecoderLayer`).
    pub post_norm_eps: f32,
    /// Base of the rotary angles (`rope.freq_base`).
    pub rope_theta: f64,
    /// Pairing of the rotated elements.
    pub rope_pairs: RopePairs,
    /// Factor on the logits (`logit_scale`, default 1).
    pub logit_scale: f32,
    /// Soft cap on the scaled logits (`final_logit_softcapping`); none means no cap.
    pub softcap: Option<f32>,
}

impl Geometry {
    /// Width of a query row: `heads * head_dim`.
    pub fn q_width(&self) -> usize {
        self.heads * self.head_dim
    }
    /// Width of a key or value row: `kv_heads * head_dim`.
    pub fn kv_width(&self) -> usize {
        self.kv_heads * self.head_dim
    }
    /// Factor on every attention score, 1/sqrt(head_dim).
    pub fn score_scale(&self) -> f32 {
        (1.0 / (self.head_dim as f64).sqrt()) as f32
    }
}

/// What the drafter needs beside its [`Geometry`].
#[derive(Clone, Debug, PartialEq)]
pub struct DraftSpec {
    /// Rows of a block: the anchor and `block - 1` masks (`dflash.block_size`).
    pub block: usize,
    /// Token whose embedding fills the unknown rows (`tokenizer.ggml.mask_token_id`).
    pub mask_token: u32,
    /// Target layers whose OUTPUTS are the context features, 0-based (`dflash.target_layers` holds layer inputs: minus one).
    pub target_layers: Vec<usize>,
}

/// Storage type of keys and values.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum KvType {
    /// Half precision, rounded to nearest even: the default.
    #[default]
    F16,
    /// 8-bit blocks of 32 with an f16 scale.
    Q8_0,
    /// Single precision: the reference only.
    F32,
}

/// One layer's KV cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CacheSpec {
    /// Key and value heads.
    pub kv_heads: usize,
    /// Elements of a head.
    pub head_dim: usize,
    /// `Some(window)`: a ring of `window + room` positions, position p in row `p % capacity`; `None`: a plane, position p in row p.
    pub window: Option<usize>,
}
