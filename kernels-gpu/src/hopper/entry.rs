//! The entries of a device module whose bodies are for Hopper. Their threads and registers are part of them.

use super::backward::{grad, scan as scan_back, states};
use super::{fix, prep, scan};
use crate::entry::entries;
use crate::gate::{Gdn, Kda};
use crate::params::{FixParams, GradParams, PrepParams, ScanBackParams, ScanParams, StatesParams};

entries! {
    prep_kda_bf16_hopper = prep::prep, PrepParams, threads = 256, blocks_per_sm = 2;
    prep_gdn_bf16_hopper = prep::scalar::prep, PrepParams, threads = 256, blocks_per_sm = 3;
    scan_push_bf16_hopper_1 = scan::scan_push::<1>, ScanParams, threads = 256, registers = 255;
    scan_push_bf16_hopper_2 = scan::scan_push::<2>, ScanParams, threads = 384, registers = 168;
    fix_out_bf16_hopper = fix::fix_out, FixParams, threads = 256;
    scan_states_bf16_hopper = states::scan_states, StatesParams, threads = 256, registers = 255;
    scan_back_bf16_hopper = scan_back::scan_back, ScanBackParams, threads = 256, registers = 255;
    grad_kda_bf16_hopper = grad::grad::<Kda>, GradParams, threads = 512;
    grad_gdn_bf16_hopper = grad::grad::<Gdn>, GradParams, threads = 512;
}
