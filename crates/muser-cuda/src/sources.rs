//! The programs that a model needs on a card, for NVRTC: which files, with what defined before them, and their kernels.

use crate::chain;
use crate::few::{product_name, serves};
use crate::kv::suffix;
use crate::product::{Crew, Room, crew, team};
use crate::stream::{WIDE_COLUMNS, Wide, has_kernel};
use crate::strict;
use crate::weights::{Layout, source};
use muser_core::{KvType, Lane};
use muser_format::DType;

/// A program: its name, what is defined before it, its text, and its kernels by the names that launches use.
pub(crate) struct Source {
    pub name: String,
    pub defines: String,
    pub text: &'static str,
    pub kernels: Vec<(&'static str, String)>,
}

/// Programs that every model needs.
const COMMON: [(&str, &str, &[&str]); 3] = [
    ("probe", include_str!("kernels/probe.cu"), &["read_all"]),
    ("largest", include_str!("kernels/largest.cu"), &["span_largest", "largest_found"]),
    (
        "norm",
        include_str!("kernels/norm.cu"),
        &[
            "embed",
            "rms_norm",
            "tail",
            "tail_rows",
            "pick_features",
            "silu_mul",
            "silu_rows",
            "scale_cap",
            "gather",
            "argmax",
        ],
    ),
];

/// Attention of the serving lane: once for each type of keys and values.
const ATTENTION: [(&str, &str, &[&str]); 2] = [
    (
        "attend",
        concat!(
            include_str!("kernels/kv.cuh"),
            include_str!("kernels/flash.cuh"),
            include_str!("kernels/attend.cu")
        ),
        &["qk_few", "qk_rows", "attend_rows", "attend_rows_join"],
    ),
    (
        "decode",
        concat!(include_str!("kernels/kv.cuh"), include_str!("kernels/decode.cu")),
        &["attend_few", "attend_join"],
    ),
];

/// The same by warpgroups.
const ATTEND_WIDE: (&str, &str, &[&str]) = (
    "attend_wide",
    concat!(include_str!("kernels/flash.cuh"), include_str!("kernels/attend_wide.cu")),
    &["attend_wide"],
);

/// What stands before and behind products of many rows from the tiles.
const JOIN: (&str, &str, &[&str]) = (
    "join",
    concat!(include_str!("kernels/stream.cuh"), include_str!("kernels/join.cu")),
    &["arrange", "join", "join_silu"],
);
const STREAM: &str = concat!(include_str!("kernels/stream.cuh"), include_str!("kernels/stream.cu"));
const STREAM_WIDE: &str = concat!(
    include_str!("kernels/tile.cuh"),
    include_str!("kernels/stream.cuh"),
    include_str!("kernels/stream_wide.cu")
);

/// Products of few rows, and all of a layer's for one.
const PROJECT: &str = concat!(include_str!("kernels/tile.cuh"), include_str!("kernels/project.cu"));
const CHAIN: &str = concat!(
    include_str!("kernels/tile.cuh"),
    include_str!("kernels/ring.cuh"),
    include_str!("kernels/chain.cu")
);

/// All programs for a model with matrices of these types and products of these layouts; each is compiled by a thread of its own.
pub(crate) fn sources(
    types: &[DType],
    products: &[Vec<Layout>],
    chained: Option<&[Layout]>,
    lane: Lane,
    kv: KvType,
    room: Room,
) -> Vec<Source> {
    let whole = |(name, text, kernels): &(&str, &'static str, &[&'static str])| Source {
        name: name.to_string(),
        defines: String::new(),
        text,
        kernels: kernels.iter().map(|k| (*k, k.to_string())).collect(),
    };
    let wide = room.wide && kv == KvType::F16;
    let common = COMMON.iter().chain([&JOIN]).chain(Some(&ATTEND_WIDE).filter(|_| wide)).map(whole);
    let mut numbers: Vec<usize> = types.iter().map(|dtype| source(*dtype).0).collect();
    numbers.sort_unstable();
    numbers.dedup();
    if lane == Lane::Strict {
        let packs = numbers.into_iter().map(|number| Source {
            name: format!("strict_pack_{number}"),
            defines: format!("#define SOURCE {number}"),
            text: strict::PACK,
            kernels: vec![("strict_pack", format!("strict_pack_{number}"))],
        });
        return strict::PROGRAMS.iter().chain(&COMMON[..2]).map(whole).chain(packs).collect();
    }
    let variants = products.iter().flat_map(|layouts| [1, 2, 4, 8, 16].map(|columns| (layouts, columns)));
    let variants = variants.filter(|(layouts, columns)| serves(products, layouts, *columns));
    let programs = variants.map(|(layouts, columns)| {
        let name = product_name(layouts, columns);
        let mut kernels = vec![("project", name.clone())];
        let Crew { warps, stages } = crew(room, layouts, columns);
        let mut defines = format!(
            "#define TYPE {}\n#define COLUMNS {columns}\n#define WARPS {warps}\n#define RING_TILES {stages}",
            layouts[0] as i32
        );
        if team(room, columns) > 1 {
            defines += &format!("\n#define TEAM {}", team(room, columns));
        }
        match layouts.get(1) {
            Some(side) => defines += &format!("\n#define SIDE {}", *side as i32),
            None if columns == 1 => kernels.push(("widen", format!("widen_{}", layouts[0].name()))),
            None => {}
        }
        Source { name, defines, text: PROJECT, kernels }
    });
    let single = || products.iter().filter(|layouts| layouts.len() == 1).map(|layouts| layouts[0]);
    let streams = single().filter(|layout| !room.wide && has_kernel(*layout)).map(|layout| Source {
        name: format!("stream_{}", layout.name()),
        defines: format!("#define TYPE {}", layout as i32),
        text: STREAM,
        kernels: vec![("stream", format!("stream_{}", layout.name()))],
    });
    let kernels = single().flat_map(|layout| WIDE_COLUMNS.map(|columns| (layout, columns)));
    let wide = kernels.filter_map(|(layout, columns)| Some((layout, Wide::of(room, layout, columns)?)));
    let wide = wide.map(|(layout, wide)| Source {
        name: wide.name(layout),
        defines: format!(
            "#define TYPE {}\n#define COLUMNS {}\n#define STAGES {}\n#define RING_TILES {}",
            layout as i32, wide.columns, wide.stages, wide.tiles
        ),
        text: STREAM_WIDE,
        kernels: vec![("stream_wide", wide.name(layout))],
    });
    let streams = streams.chain(wide);
    let packs = numbers.into_iter().map(|number| Source {
        name: format!("pack_{number}"),
        defines: format!("#define SOURCE {number}"),
        text: include_str!("kernels/pack.cu"),
        kernels: ["bound", "pack"].map(|k| (k, format!("{k}_{number}"))).to_vec(),
    });
    let attention = ATTENTION.iter().map(|(name, text, kernels)| Source {
        name: format!("{name}{}", suffix(kv)),
        defines: if kv == KvType::Q8_0 { "#define KV_Q8_0".into() } else { String::new() },
        text,
        kernels: kernels.iter().map(|k| (*k, format!("{k}{}", suffix(kv)))).collect(),
    });
    let held = |layouts: &[Layout]| {
        (1..=chain::MOST_CHAINED).filter(|rows| chain::holds(layouts, *rows)).collect::<Vec<_>>()
    };
    let chains = chained.into_iter().flat_map(|layouts| {
        held(layouts).into_iter().map(move |rows| Source {
            name: chain::name(layouts, rows),
            defines: chain::defines(layouts, rows),
            text: CHAIN,
            kernels: vec![("chain", chain::name(layouts, rows))],
        })
    });
    common.chain(attention).chain(programs).chain(streams).chain(packs).chain(chains).collect()
}

/// What every source begins with.
pub(crate) const HEADERS: [&str; 4] = [
    include_str!("kernels/ptx.cuh"),
    include_str!("kernels/common.cuh"),
    include_str!("kernels/layout.cuh"),
    include_str!("kernels/cache.cuh"),
];
