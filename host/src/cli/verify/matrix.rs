//! The cases. Each group walks through what it is about; the rest is drawn, from the seed.

use std::fmt;

use rand::SeedableRng;
use rand::seq::IndexedRandom;
use rand_chacha::ChaCha8Rng;

use super::cuts::CutKind;
use crate::compare::Regime;
use crate::generate::{BetaKind, Decay, GateKind, Keys, Spec, shapes};
use crate::inputs::{Op, StateLayout};
use crate::op::{MWire, Mode};
use crate::tensor::Dtype;

const OPS: [Op; 2] = [Op::Kda, Op::Gdn];
const DTYPES: [Dtype; 3] = [Dtype::F32, Dtype::Bf16, Dtype::F16];
const MODES: [Mode; 3] = [Mode::Overlap, Mode::Bulk, Mode::Exact];
const CHUNKS: [usize; 3] = [16, 32, 64];
const M_WIRES: [MWire; 3] = [MWire::Auto, MWire::Bf16, MWire::F32];
const GATES: [GateKind; 3] = [GateKind::Given, GateKind::Softplus, GateKind::LowerBound];
const DECAYS: [Decay; 6] = [Decay::None, Decay::Slow, Decay::Default, Decay::Fast, Decay::Bursty, Decay::AllStrong];
const KEYS: [Keys; 2] = [Keys::Iso, Keys::CommonMean];
const BETAS: [BetaKind; 5] =
    [BetaKind::Standard, BetaKind::Small, BetaKind::UpTo2, BetaKind::Logits, BetaKind::Logits2];

/// One problem and one way to compute it.
#[derive(Clone, Debug)]
pub(super) struct Case {
    /// Place in the matrix.
    pub number: usize,
    /// What it is an example of.
    pub group: &'static str,
    /// Whether `--quick` includes it.
    pub quick: bool,
    /// The problem.
    pub spec: Spec,
    /// Where the cuts are.
    pub kind: CutKind,
    /// P - 1 offsets.
    pub cuts: Vec<usize>,
    /// How summaries travel.
    pub mode: Mode,
    /// Chunk length.
    pub chunk: usize,
    /// Element type of M on the wire.
    pub m_wire: MWire,
    /// Whether kernels check barriers, bounds and unwritten outputs.
    pub checked: bool,
}

impl Case {
    /// Number of PEs.
    pub fn pes(&self) -> usize {
        self.cuts.len() + 1
    }

    /// Whether the result must be that of one PE, bit for bit.
    pub fn bitwise(&self) -> bool {
        self.mode == Mode::Exact && self.kind == CutKind::Aligned
    }

    /// What makes the problem demanding in low precision.
    fn hardships(&self) -> usize {
        let Spec { decay, keys, beta, k, .. } = &self.spec;
        let hardships = [
            matches!(decay, Decay::None | Decay::Bursty),
            *keys == Keys::CommonMean,
            matches!(beta, BetaKind::UpTo2 | BetaKind::Logits2),
            *k < 32, // more keys in a chunk than directions to point in: they cannot but be correlated
        ];
        hardships.into_iter().filter(|&hardship| hardship).count()
    }

    /// How demanding the problem is in low precision.
    pub fn regime(&self) -> Regime {
        if self.hardships() > 0 { Regime::Hard } else { Regime::Ordinary }
    }

    /// Factor of what is allowed: hardships reinforce each other in low precision.
    pub fn allowance(&self) -> f64 {
        if self.hardships() > 1 && self.spec.dtype != Dtype::F32 { 1.5 } else { 1.0 }
    }
}

impl fmt::Display for Case {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { spec, cuts, mode, chunk, m_wire, checked, .. } = self;
        let Spec { gate, decay, keys, beta, l2norm, initial_state, state_layout, seed, .. } = spec;
        write!(f, "{spec}, gate {gate:?}, decay {decay:?}, keys {keys:?}, beta {beta:?}")?;
        if *l2norm {
            write!(f, ", l2norm")?;
        }
        if *initial_state {
            write!(f, ", h0")?;
        }
        write!(f, ", states {state_layout:?}; {} PEs, cuts {cuts:?}, {mode}, chunk {chunk}", self.pes())?;
        write!(f, ", M in {}{}, seed {seed}", m_wire.resolve(spec.dtype), if *checked { ", checked" } else { "" })
    }
}

/// Every case, in groups.
pub(super) fn matrix(seed: u64) -> Vec<Case> {
    let mut list = List { seed, rng: ChaCha8Rng::seed_from_u64(seed), cases: Vec::new(), in_group: 0 };
    list.shapes();
    list.gates();
    list.keys_and_steps();
    list.modes_and_cuts();
    list.wire();
    list.packed();
    list.states();
    list.exact();
    list.long();
    list.mixed();
    list.cases
}

struct List {
    seed: u64,
    rng: ChaCha8Rng,
    cases: Vec<Case>,
    in_group: u32,
}

/// A case without what can be worked out.
struct Way {
    pes: usize,
    kind: CutKind,
    mode: Mode,
    chunk: usize,
    m_wire: MWire,
    checked: bool,
}

impl List {
    fn pick<T: Copy>(&mut self, from: &[T]) -> T {
        *from.choose(&mut self.rng).expect("a list of choices")
    }

    /// A way to compute, all of it drawn.
    fn way(&mut self) -> Way {
        Way {
            pes: self.pick(&[1, 2, 3, 4, 5, 6, 7, 8]),
            kind: self.pick(&CutKind::ALL),
            mode: self.pick(&MODES),
            chunk: self.pick(&CHUNKS),
            m_wire: MWire::Auto,
            checked: false,
        }
    }

    /// A small problem of drawn shape in which an earlier PE's state matters.
    fn small(&mut self) -> Spec {
        let h = self.pick(&[1, 2]);
        Spec {
            op: self.pick(&OPS),
            t: self.pick(&[65, 130, 257]),
            h,
            hv: h * self.pick(&[1, 2]),
            k: self.pick(&[16, 32, 64]),
            v: self.pick(&[16, 32, 64, 80]),
            dtype: self.pick(&DTYPES),
            decay: Decay::Slow,
            beta: BetaKind::Small,
            ..Spec::default()
        }
    }

    fn add(&mut self, group: &'static str, spec: Spec, way: Way) {
        if self.cases.last().is_none_or(|last| last.group != group) {
            self.in_group = 0;
        }
        let number = self.cases.len();
        // Neighbours may share a problem, which is then made once.
        let seed = spec.seed.wrapping_add(self.seed.wrapping_mul(1 << 20));
        let spec = Spec { seed, ..spec };
        let cuts = way.kind.cuts(&spec, way.pes, way.chunk, &mut self.rng);
        let Way { kind, mode, chunk, m_wire, checked, .. } = way;
        // One in four, spread by the golden ratio, so that it keeps step with none of the loops.
        let quick = self.in_group.wrapping_mul(0x9e37_79b9) < u32::MAX / 4;
        self.in_group += 1;
        self.cases.push(Case { number, group, quick, spec, kind, cuts, mode, chunk, m_wire, checked });
    }

    fn shapes(&mut self) {
        for shape in shapes() {
            for op in OPS {
                for dtype in DTYPES {
                    let decay = self.pick(&[Decay::Slow, Decay::Default]);
                    let spec = Spec { op, dtype, decay, ..shape.clone() };
                    for _ in 0..4 {
                        let way = self.way();
                        self.add("shapes", spec.clone(), way);
                    }
                }
            }
        }
    }

    fn gates(&mut self) {
        for op in OPS {
            for gate in GATES.into_iter().filter(|&gate| op == Op::Kda || gate != GateKind::LowerBound) {
                for decay in DECAYS {
                    for dtype in DTYPES {
                        let beta = self.pick(&[BetaKind::Standard, BetaKind::Small]);
                        let spec = Spec { op, gate, decay, dtype, beta, ..self.small() };
                        for _ in 0..2 {
                            let way = self.way();
                            self.add("gates and decays", spec.clone(), way);
                        }
                    }
                }
            }
        }
    }

    fn keys_and_steps(&mut self) {
        for op in OPS {
            for keys in KEYS {
                for beta in BETAS {
                    for l2norm in [false, true] {
                        for dtype in DTYPES {
                            let spec = Spec { op, keys, beta, l2norm, dtype, ..self.small() };
                            let way = self.way();
                            self.add("keys and steps", spec, way);
                        }
                    }
                }
            }
        }
    }

    fn modes_and_cuts(&mut self) {
        for mode in MODES {
            for chunk in CHUNKS {
                for kind in CutKind::ALL {
                    let spec = self.small();
                    for pes in 1..=8 {
                        let way = Way { pes, kind, mode, chunk, ..self.way() };
                        self.add("modes and cuts", spec.clone(), way);
                    }
                }
            }
        }
    }

    fn wire(&mut self) {
        for op in OPS {
            for dtype in DTYPES {
                for pes in [2, 3, 5, 8] {
                    let spec = Spec { op, dtype, ..self.small() };
                    for m_wire in M_WIRES {
                        let mode = self.pick(&[Mode::Overlap, Mode::Bulk]);
                        let way = Way { pes, mode, m_wire, ..self.way() };
                        self.add("M on the wire", spec.clone(), way);
                    }
                }
            }
        }
    }

    fn packed(&mut self) {
        for shape in shapes().into_iter().filter(|shape| shape.cu_seqlens.is_some()) {
            for op in OPS {
                for pes in 1..=8 {
                    let Spec { dtype, decay, beta, .. } = self.small();
                    let spec = Spec { op, dtype, decay, beta, ..shape.clone() };
                    for mode in MODES {
                        let way = Way { pes, mode, ..self.way() };
                        self.add("packed sequences", spec.clone(), way);
                    }
                }
            }
        }
    }

    fn states(&mut self) {
        for op in OPS {
            for state_layout in [StateLayout::KFirst, StateLayout::VFirst] {
                for sequences in 0..3 {
                    for dtype in DTYPES {
                        let small = Spec { op, dtype, state_layout, initial_state: true, ..self.small() };
                        let spec = match sequences {
                            0 => small,
                            1 => Spec { b: 3, t: 70, ..small },
                            _ => Spec { t: 131, cu_seqlens: Some(vec![0, 0, 40, 131]), ..small },
                        };
                        for mode in MODES {
                            let way = Way { mode, ..self.way() };
                            self.add("initial states", spec.clone(), way);
                        }
                    }
                }
            }
        }
    }

    fn exact(&mut self) {
        for op in OPS {
            for dtype in DTYPES {
                for chunk in CHUNKS {
                    let cu_seqlens = self.pick(&[None, Some([0, 70, 70, 300])]).map(Vec::from);
                    let spec = Spec { op, dtype, t: 300, cu_seqlens, ..self.small() };
                    for pes in 2..=8 {
                        let kind = CutKind::Aligned;
                        let way = Way { pes, kind, mode: Mode::Exact, chunk, ..self.way() };
                        self.add("exact bitwise", spec.clone(), way);
                    }
                }
            }
        }
    }

    fn long(&mut self) {
        for op in OPS {
            for dtype in DTYPES {
                let spec =
                    Spec { op, dtype, t: 2000, h: 2, hv: 4, k: 128, v: 128, decay: Decay::Slow, ..Spec::default() };
                for mode in MODES {
                    let way = Way { mode, ..self.way() };
                    self.add("long sequences", spec.clone(), way);
                }
            }
        }
    }

    fn mixed(&mut self) {
        let shapes = shapes();
        for draw in 0..1000 {
            let shape = shapes.choose(&mut self.rng).expect("a list of shapes").clone();
            let op = self.pick(&OPS);
            let spec = Spec {
                op,
                dtype: self.pick(&DTYPES),
                gate: self.pick(if op == Op::Kda { &GATES } else { &GATES[..2] }),
                decay: self.pick(&DECAYS),
                keys: self.pick(&KEYS),
                beta: self.pick(&BETAS),
                l2norm: self.pick(&[false, true]),
                initial_state: self.pick(&[false, true]),
                state_layout: self.pick(&[StateLayout::KFirst, StateLayout::VFirst]),
                seed: 2 + draw,
                ..shape
            };
            let way = Way { m_wire: self.pick(&M_WIRES), checked: self.pick(&[true, false, false]), ..self.way() };
            self.add("everything mixed", spec, way);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    #[test]
    fn a_number_names_the_same_case_every_time() {
        let (a, b) = (matrix(5), matrix(5));
        assert!(a.iter().zip(&b).all(|(a, b)| a.to_string() == b.to_string()));
        assert!(a.iter().enumerate().all(|(i, case)| case.number == i));
        assert_ne!(a[0].spec.seed, matrix(6)[0].spec.seed);
    }

    #[test]
    fn the_quick_cases_still_see_every_choice() {
        let cases: Vec<Case> = matrix(1).into_iter().filter(|case| case.quick).collect();
        let seen = |of: &dyn Fn(&Case) -> String| cases.iter().map(of).collect::<BTreeSet<_>>().len();
        assert_eq!(seen(&|case| case.group.into()), 10);
        assert_eq!(seen(&|case| format!("{} {}", case.spec.op, case.spec.dtype)), 6);
        assert_eq!(seen(&|case| format!("{:?}", case.spec.gate)), GATES.len());
        assert_eq!(seen(&|case| format!("{:?}", case.spec.decay)), DECAYS.len());
        assert_eq!(seen(&|case| format!("{:?} {:?}", case.spec.keys, case.spec.beta)), KEYS.len() * BETAS.len());
        assert_eq!(seen(&|case| format!("{} {}", case.mode, case.chunk)), MODES.len() * CHUNKS.len());
        assert_eq!(seen(&|case| format!("{:?}", case.kind)), CutKind::ALL.len());
        assert_eq!(seen(&|case| case.pes().to_string()), 8);
        assert_eq!(seen(&|case| format!("{:?}", case.m_wire)), M_WIRES.len());
        assert_eq!(seen(&|case| format!("{:?} {}", case.spec.state_layout, case.spec.initial_state)), 4);
        assert!(cases.iter().filter(|case| case.bitwise()).count() >= 12);
    }
}
