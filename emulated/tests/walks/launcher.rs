//! A step whose kernels are portable, but for the two walks, which are those for Hopper on emulated threads if asked for.

use std::collections::HashMap;
use std::time::Instant;

use cuda_std::emulated::{Emulator, Launch, Schedule};
use deltalink::exec::{Grid, Kernel};
use deltalink::inputs::Op;
use deltalink::tensor::Dtype;
use deltalink_tests::backward_pes::{Launcher, Portable};
use half::bf16;
use kernels_gpu::hopper::backward::{value_panels_len, walk};
use kernels_gpu::params::{Array, Chunk, Records, ScanBackParams, StatesParams, Tables, Tensor};

use deltalink_emulated::images;

/// What a launch of a walk leaves: its name, states and values in rows.
pub type Left = (&'static str, Vec<bf16>, Vec<bf16>);

/// Runs the kernels, and keeps what walks leave.
pub struct Walks {
    portable: Portable,
    emulator: Emulator,
    /// The order of events in bodies for Hopper; none if the portable ones run.
    hopper: Option<Schedule>,
    /// Images of states and panels of values by the address of the tensor in rows: launches of the reverse scan share them.
    images: HashMap<u64, [Vec<bf16>; 2]>,
    /// What each launch left.
    pub left: Vec<Left>,
}

/// The tensors of a walk.
struct Place {
    tables: Tables,
    records: Records,
    states: Tensor,
    values: Tensor,
}

impl Walks {
    /// Portable walks.
    pub fn portable() -> Self {
        Self {
            portable: Portable::new(),
            emulator: Emulator::new(),
            hopper: None,
            images: HashMap::new(),
            left: Vec::new(),
        }
    }

    /// Walks for Hopper.
    pub fn hopper(schedule: Schedule) -> Self {
        Self { hopper: Some(schedule), ..Self::portable() }
    }

    /// What has not been written, or should be zero and is not, after all launches.
    pub fn assert_complete(&self) {
        for images in self.images.values().flatten() {
            assert!(images.iter().all(|x| x.is_finite()), "elements that no launch wrote");
        }
    }

    /// Runs `kernel` over images of what is in rows at `place`, and brings its results back into rows.
    fn run<P: bytemuck::Pod>(
        &mut self,
        kernel: &'static str,
        schedule: Schedule,
        shared_bytes: usize,
        place: &Place,
        params: impl FnOnce(Records, Tensor, Tensor) -> P,
    ) {
        let (hv, v) = (place.tables.sizes.hv as usize, place.tables.sizes.v as usize);
        // SAFETY: the step's tensors, which nobody else uses during a launch.
        let (records, states, values, chunks) = unsafe {
            (elements(&place.records.operands), elements(&place.states), elements(&place.values), chunks(&place.tables))
        };
        let mut record_images = images::records(records);
        let [state_images, value_panels] = self.images.entry(place.states.addr).or_insert_with(|| {
            let unwritten = |len| vec![bf16::NAN; len];
            [unwritten(states.len()), unwritten(value_panels_len(chunks.len(), hv))]
        });
        let at = |x: &mut [bf16], like: Tensor| Tensor { addr: x.as_mut_ptr() as u64, len: x.len() as u64, ..like };
        let operands = at(&mut record_images, place.records.operands);
        let params = params(
            Records { operands, ..place.records },
            at(state_images, place.states),
            at(value_panels, place.values),
        );
        let launch = Launch {
            kernel,
            grid: 1,
            threads: 128 * walk::WARPGROUPS as u32,
            shared_bytes: shared_bytes as u32,
            schedule,
            origin: Instant::now(),
            idle: &|| (),
        };
        // SAFETY: parameters of this kernel, of memory that lives as long as the call.
        unsafe { deltalink_emulated::kernel(kernel).unwrap().run(&mut self.emulator, &launch, 0, &params) }
            .unwrap_or_else(|fault| panic!("{schedule:?}: {fault}"));

        let written = |x: bf16| if x.is_nan() { bf16::ZERO } else { x };
        for (rows, image) in states.chunks_exact_mut(images::IMAGE_LEN).zip(state_images.chunks(images::IMAGE_LEN)) {
            rows.iter_mut().zip(images::get(image)).for_each(|(row, x)| *row = written(x));
        }
        for (number, panel) in value_panels.chunks_exact(images::PANEL_LEN).enumerate() {
            let (row, block) = (number / 2, number % 2);
            let (chunk, head) = (chunks[row / hv], row % hv);
            for (t, columns) in images::get(panel).chunks_exact(64).enumerate() {
                if t >= chunk.len as usize {
                    assert!(columns.iter().all(|x| x.is_nan() || *x == bf16::ZERO), "{kernel}: token {t} of {chunk:?}");
                    continue;
                }
                let start = ((chunk.token as usize + t) * hv + head) * v + 64 * block;
                (0..64).for_each(|c| values[start + c] = written(columns[c]));
            }
        }
    }

    fn keep(&mut self, name: &'static str, place: &Place) {
        // SAFETY: as in `run`.
        let (states, values) = unsafe { (elements(&place.states), elements(&place.values)) };
        self.left.push((name, states.to_vec(), values.to_vec()));
    }
}

impl Launcher for Walks {
    fn walkers(&self, room: usize) -> usize {
        if self.hopper.is_some() { 1 } else { room }
    }

    fn launch<K: Kernel>(
        &mut self,
        kind: (Op, Dtype),
        params: &K,
        blocks: (Grid, usize, usize),
        written: &[(&str, Tensor)],
    ) {
        match (K::NAME, self.hopper) {
            (StatesParams::NAME, _) => {
                let p: StatesParams = *bytemuck::from_bytes(bytemuck::bytes_of(params));
                let place = Place { tables: p.tables, records: p.records, states: p.states, values: p.v_new };
                match self.hopper {
                    Some(schedule) => {
                        let params = |records, states, v_new| StatesParams { records, states, v_new, ..p };
                        self.run("scan_states_bf16_hopper", schedule, walk::STATES_SHARED, &place, params);
                    }
                    None => self.portable.launch(kind, params, blocks, written),
                }
                self.keep(K::NAME, &place);
            }
            (ScanBackParams::NAME, _) => {
                let p: ScanBackParams = *bytemuck::from_bytes(bytemuck::bytes_of(params));
                let place = Place { tables: p.tables, records: p.records, states: p.d_states, values: p.d_v_new };
                match self.hopper {
                    Some(schedule) => {
                        let params = |records, d_states, d_v_new| ScanBackParams { records, d_states, d_v_new, ..p };
                        self.run("scan_back_bf16_hopper", schedule, walk::SCAN_BACK_SHARED, &place, params);
                    }
                    None => self.portable.launch(kind, params, blocks, written),
                }
                self.keep(K::NAME, &place);
            }
            _ => self.portable.launch(kind, params, blocks, written),
        }
    }
}

/// # Safety
/// A tensor of bf16 in memory that nobody else uses as long as the slice.
unsafe fn elements<'a>(x: &Tensor) -> &'a mut [bf16] {
    // SAFETY: by contract.
    unsafe { std::slice::from_raw_parts_mut(x.addr as *mut bf16, x.len as usize) }
}

/// # Safety
/// Tables in memory that nobody writes as long as the slice.
unsafe fn chunks<'a>(tables: &Tables) -> &'a [Chunk] {
    let Array { addr, len } = tables.chunks;
    // SAFETY: by contract.
    unsafe { std::slice::from_raw_parts(addr as *const Chunk, len as usize) }
}
