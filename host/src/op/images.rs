//! Tables of steps on the device, made once and used by every step of the same form.
//!
//! What a step needs on the device besides tensors follows from its plan, its sizes and its options. It is brought there when a
//! step of that form comes first, and the host does not write it again. What changes from step to step lies elsewhere: tickets and
//! other counters beside the tables, counts in the operation's [vitals](super::vitals), the epoch beside the channel's words;
//! [`kernels_gpu::begin`] sets all of them on the device.

use kernels_gpu::params::Array;
use kernels_gpu::protocol::ChannelLayout;

use super::parts::Parts;
use crate::exec::{ExecError, Executor, Image, KeptMemory, Part};
use crate::plan::{Layout, Plan};

/// Forms whose tables stay. Programs have few (one for each length of batch, or of packed sequences that repeats); of others
/// the one that was used longest ago goes.
const KEPT: usize = 8;

/// Smallest block of memory for tables; others are powers of two, so that what one form leaves fits the next.
const SMALLEST: usize = 4 << 10;

/// What tables of KDA and GDN follow from, apart from what never changes in an operation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Form {
    /// With the cuts, the whole plan.
    sequences: Layout,
    cuts: Vec<usize>,
    channel: ChannelLayout,
    /// How this PE cuts its segments.
    parts: Parts,
    /// Column blocks that a block of each walk takes.
    walkers: [usize; 2],
}

impl Form {
    pub fn new(plan: &Plan, channel: ChannelLayout, parts: &Parts, walkers: [usize; 2]) -> Self {
        Self { sequences: plan.layout.clone(), cuts: plan.cuts.clone(), channel, parts: parts.clone(), walkers }
    }
}

/// Words that are zero when a step begins.
#[derive(Clone, Copy, Debug)]
pub(super) struct Words {
    first: usize,
    len: usize,
}

/// A list of work items, and its ticket.
#[derive(Clone, Copy, Debug)]
pub(super) struct Work {
    items: Part,
    ticket: Words,
}

/// A step's tables under construction.
#[derive(Debug, Default)]
pub(super) struct Draft {
    /// What is read only, and what a step's first kernel writes.
    pub image: Image,
    words: usize,
}

impl Draft {
    /// Appends a list of work items and a ticket by which blocks take them.
    pub fn push_work<T: bytemuck::Pod>(&mut self, items: &[T]) -> Work {
        Work { items: self.image.push(items), ticket: self.push_words(1) }
    }

    /// Appends words that every step counts from zero.
    pub fn push_words(&mut self, len: usize) -> Words {
        let first = self.words;
        self.words += len;
        Words { first, len }
    }
}

/// Where a step's tables and tickets lie.
#[derive(Clone, Copy, Debug)]
pub(super) struct Placed {
    /// Address of the tables, for [`Part::at`].
    pub tables: u64,
    /// All words that every step counts from zero, tickets above all.
    pub tickets: Array,
}

impl Placed {
    /// The items of `work`, and their ticket.
    pub fn work(&self, work: Work) -> (Array, Array) {
        (work.items.at(self.tables), self.words(work.ticket))
    }

    /// Of u64.
    pub fn words(&self, words: Words) -> Array {
        Array { addr: self.tickets.addr + (words.first * size_of::<u64>()) as u64, len: words.len as u64 }
    }
}

/// Tables of one form.
struct Kept<X: Executor, P, F> {
    form: F,
    memory: X::Memory,
    placed: Placed,
    parts: P,
    used: u64,
    /// Whether a captured step reads them: then they stay as long as the operation.
    captured: bool,
}

/// The tables of one direction, by form. `P` says where in them things are.
pub(super) struct Images<X: Executor, P, F = Form> {
    kept: Vec<Kept<X, P, F>>,
    uses: u64,
}

impl<X: Executor, P, F> Default for Images<X, P, F> {
    fn default() -> Self {
        Self { kept: Vec::new(), uses: 0 }
    }
}

impl<X: Executor, P: Clone, F: Clone + PartialEq> Images<X, P, F> {
    /// The tables of `form`, made by `draft` if they are not there.
    ///
    /// # Errors
    /// [`ExecError`] if there is no memory for them; [`ExecError::NotWarm`] if they are not there and cannot be made now.
    pub fn place(
        &mut self,
        exec: &mut X,
        form: &F,
        draft: impl FnOnce(&mut Draft) -> P,
    ) -> Result<(Placed, P), ExecError> {
        self.uses += 1;
        if let Some(found) = self.kept.iter_mut().find(|kept| kept.form == *form) {
            found.used = self.uses;
            found.captured |= exec.captures();
            return Ok((found.placed, found.parts.clone()));
        }
        if exec.captures() {
            return Err(ExecError::NotWarm { what: "the tables of a step" });
        }
        let mut new = Draft::default();
        let parts = draft(&mut new);
        let tables = new.image.bytes().len().next_multiple_of(16);
        let bytes = tables + new.words * size_of::<u64>();
        let mut memory = self.memory(exec, bytes)?;
        exec.write(&mut memory, 0, new.image.bytes())?;
        let base = memory.address();
        let tickets = Array { addr: base + tables as u64, len: new.words as u64 };
        let placed = Placed { tables: base, tickets };
        let kept = Kept { form: form.clone(), memory, placed, parts: parts.clone(), used: self.uses, captured: false };
        self.kept.push(kept);
        Ok((placed, parts))
    }

    /// Memory for a new form's tables: that of an old one that goes, if it is large enough. Steps that still read it come
    /// before the new contents in the order of the stream.
    fn memory(&mut self, exec: &mut X, bytes: usize) -> Result<X::Memory, ExecError> {
        if self.kept.iter().filter(|kept| !kept.captured).count() >= KEPT {
            let oldest =
                self.kept.iter().enumerate().filter(|(_, kept)| !kept.captured).min_by_key(|(_, kept)| kept.used);
            if let Some((at, _)) = oldest {
                let old = self.kept.swap_remove(at).memory;
                if old.bytes() >= bytes {
                    return Ok(old);
                }
                exec.reuse(old);
            }
        }
        exec.keep(bytes.next_power_of_two().max(SMALLEST))
    }

    /// Bytes that all tables take.
    pub fn bytes(&self) -> usize {
        self.kept.iter().map(|kept| kept.memory.bytes()).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::exec::cpu::Cpu;
    use crate::plan::Cuts;

    fn form(tokens: usize) -> Form {
        let plan = Plan::batch(1, tokens, &Cuts::equal(2)).unwrap();
        Form::new(&plan, ChannelLayout::new(2, 1, 64, 64, 4).unwrap(), &Parts::default(), [2, 1])
    }

    #[test]
    fn a_form_is_drafted_once_and_its_tables_stay() {
        let (mut exec, mut images) = (Cpu::new(1).unwrap(), Images::<Cpu, Work>::default());
        let mut drafts = 0;
        let mut place = |tokens: usize| {
            images.place(&mut exec, &form(tokens), |draft| {
                drafts += 1;
                draft.push_work(&[7_u64, tokens as u64])
            })
        };
        let (first, work) = place(100).unwrap();
        let (items, ticket) = first.work(work);
        assert_eq!((items.addr, items.len, ticket.addr, ticket.len), (first.tables, 2, first.tables + 16, 1));
        let (again, _) = place(100).unwrap();
        assert_eq!(again.tables, first.tables);
        assert_ne!(place(200).unwrap().0.tables, first.tables);
        assert_eq!((drafts, images.bytes()), (2, 2 * SMALLEST));
    }

    #[test]
    fn forms_that_do_not_come_back_make_room() {
        let (mut exec, mut images) = (Cpu::new(1).unwrap(), Images::<Cpu, ()>::default());
        let mut drafted = Vec::new();
        for tokens in 2..100 {
            // One form comes again and again.
            for tokens in [tokens, 1000] {
                let draft = |draft: &mut Draft| {
                    draft.push_work(&[0_u64]);
                    drafted.push(tokens);
                };
                images.place(&mut exec, &form(tokens), draft).unwrap();
            }
        }
        assert_eq!((images.kept.len(), images.bytes()), (KEPT, KEPT * SMALLEST));
        assert_eq!(drafted.iter().filter(|&&tokens| tokens == 1000).count(), 1);
    }
}
