//! What the multiplication kernels do from the cache, one thread, beside the dot units' own rate:
//! `kernels [types [columns]]`, separated by commas.
#![allow(clippy::unwrap_used)]

use muser_cpu::{Isa, probe};
use muser_format::DType;

fn main() {
    let args: Vec<String> = std::env::args().collect();
    let types = args.get(1).map_or("Q4_K,Q6_K,Q5_K,Q8_0,IQ4_XS,Q3_K,Q2_K,Q4_0", String::as_str);
    let columns = args.get(2).map_or("1,4,5,8,12", String::as_str);
    let isa = Isa::best();
    for name in types.split(',') {
        let dtype = DType::from_name(name).unwrap();
        for columns in columns.split(',').map(|n| n.parse().unwrap()) {
            let (rate, peak) = (probe::kernel(isa, dtype, columns, 6656), probe::int8_peak(1));
            println!(
                "{name:8} {columns:3} columns {:6.3} Top/s, {:3.0} % of {:.3}",
                rate / 1e12,
                100.0 * rate / peak,
                peak / 1e12
            );
        }
    }
}
