//! Asynchronous products of a warpgroup, and when they happen.

use super::Timing;
use super::block::{Block, Scope, WARP, WARPGROUP, meet};
use super::descriptor::{Half, INNER, Operand};
use super::fault::FaultKind;
use super::memory::Agent;
use super::site::Site;

/// Rows of a product.
const ROWS: usize = 64;

/// What stands in accumulators while products are under way: a NaN that nothing else makes. Arithmetic keeps its payload.
const UNDER_WAY: u32 = 0x7fed_b0b0;

/// Whether the number came from an accumulator while a product was under way.
pub(crate) fn is_under_way(x: f32) -> bool {
    x.to_bits() & 0x7fff_ffff == UNDER_WAY
}

/// Refuses a number that came from an accumulator while a product was under way.
#[track_caller]
pub(crate) fn settled(name: &'static str, x: f32) -> f32 {
    if is_under_way(x) {
        super::block::raise(Site::here(name), FaultKind::AccumulatorUnderWay { register: "operand".into() });
    }
    x
}

/// The first operand.
#[derive(Clone, Debug)]
enum Left {
    /// Each thread's four registers.
    Registers(Vec<[u32; 4]>),
    Shared(Operand),
}

/// A product.
#[derive(Clone, Debug)]
struct Product {
    site: Site,
    half: Half,
    left: Left,
    right: Operand,
    signs: f32,
    accumulate: bool,
    /// Place among accumulators.
    target: usize,
    done: bool,
}

/// An accumulator with products under way: 64 x `columns`.
#[derive(Clone, Debug)]
struct Accumulator {
    /// Address of each thread's registers.
    threads: Vec<usize>,
    columns: usize,
    numbers: Vec<f32>,
    products: usize,
}

/// What a warpgroup has under way.
#[derive(Debug, Default)]
pub(crate) struct Products {
    /// Groups, the oldest first, of committed products.
    groups: Vec<Vec<Product>>,
    open: Vec<Product>,
    /// Places of those that are finished are used again.
    accumulators: Vec<Option<Accumulator>>,
    fenced: bool,
}

/// A product as the instruction has it.
#[derive(Clone, Copy)]
pub(crate) struct Instruction {
    pub(crate) half: Half,
    pub(crate) columns: usize,
    pub(crate) signs: [i32; 2],
    /// Whether each operand is MN-major.
    pub(crate) outer_major: [bool; 2],
}

/// The first operand of one thread.
#[derive(Clone, Copy)]
pub(crate) enum LeftOf {
    Registers([u32; 4]),
    Shared(u64),
}

struct Brought<'a> {
    d: &'a mut [f32],
    a: LeftOf,
    b: u64,
    scale_d: u32,
}

/// Registers that a thread gives to a wait.
#[derive(Default)]
pub(crate) struct Carried {
    pub(crate) accumulators: Vec<(*mut f32, usize)>,
    pub(crate) operands: Vec<u32>,
}

/// Row and column of register `i` of thread `t`.
fn place(t: usize, i: usize) -> (usize, usize) {
    (16 * (t / 32) + t % 32 / 4 + 8 * (i / 2 % 2), 8 * (i / 4) + 2 * (t % 4) + i % 2)
}

/// Row and first column of operand register `i` of thread `t`.
fn left_place(t: usize, i: usize) -> (usize, usize) {
    (16 * (t / 32) + t % 32 / 4 + 8 * (i % 2), 2 * (t % 4) + 8 * (i / 2))
}

/// The operand `what` of all threads, which must be one.
fn uniform<T, V: Copy + Into<u64>>(
    brought: &[(usize, &mut T)],
    operand: &'static str,
    what: impl Fn(&T) -> V,
) -> Result<V, FaultKind> {
    let first = what(brought[0].1);
    for (thread, other) in brought {
        let (here, there) = (first.into(), what(other).into());
        if here != there {
            return Err(FaultKind::NotUniform { operand, here, there, other: *thread as u32 });
        }
    }
    Ok(first)
}

/// Issues a product.
pub(crate) fn issue(site: Site, of: Instruction, d: &mut [f32], a: LeftOf, b: u64, scale_d: u32) {
    meet(Scope::Warpgroup, site, &mut Brought { d, a, b, scale_d }, |block, all| block.issue(site, of, all));
}

/// Orders registers before products.
pub(crate) fn fence(site: Site) {
    meet(Scope::Warpgroup, site, &mut (), |block, all| {
        block.order_warps(all);
        block.own_products().fenced = true;
        Ok(())
    });
}

/// Makes a group.
pub(crate) fn commit(site: Site) {
    meet(Scope::Warpgroup, site, &mut (), |block, all| {
        block.order_warps(all);
        let products = block.own_products();
        let group = std::mem::take(&mut products.open);
        products.groups.push(group);
        Ok(())
    });
}

/// Waits until `groups` groups are under way.
pub(crate) fn wait(site: Site, groups: usize, mut carried: Carried) {
    meet(Scope::Warpgroup, site, &mut carried, |block, all| block.wait_products(groups, all));
}

impl Block {
    fn own_products(&mut self) -> &mut Products {
        let warpgroup = self.current / WARPGROUP;
        &mut self.products[warpgroup]
    }

    /// The lanes of each warp come together. (The warps of a warpgroup do not.)
    fn order_warps<T>(&mut self, all: &[(usize, &mut T)]) {
        for warp in all.chunks(WARP) {
            self.clocks.meet(warp.iter().map(|lane| lane.0));
        }
    }

    fn issue(&mut self, site: Site, of: Instruction, all: &mut [(usize, &mut Brought<'_>)]) -> Result<(), FaultKind> {
        let b = uniform(all, "b", |x| x.b)?;
        let accumulate = uniform(all, "scale_d", |x| u32::from(x.scale_d != 0))? != 0;
        let left = match all[0].1.a {
            LeftOf::Shared(_) => {
                let a = uniform(all, "a", |x| match x.a {
                    LeftOf::Shared(a) => a,
                    LeftOf::Registers(_) => 0,
                })?;
                Left::Shared(Operand::new(a, ROWS as u32, of.outer_major[0])?)
            }
            LeftOf::Registers(_) => {
                let registers = |x: &Brought<'_>| match x.a {
                    LeftOf::Registers(a) => a,
                    LeftOf::Shared(_) => [0; 4],
                };
                Left::Registers(all.iter().map(|(_, x)| registers(x)).collect())
            }
        };
        let right = Operand::new(b, of.columns as u32, of.outer_major[1])?;
        let first = all[0].0;
        let agent = Agent { thread: first, clocks: &self.clocks };
        for operand in [Some(right), if let Left::Shared(a) = left { Some(a) } else { None }].into_iter().flatten() {
            for piece in operand.pieces() {
                self.memory.announce_load(agent, piece, Operand::PIECE)?;
            }
        }
        if !self.own_products().fenced {
            return Err(FaultKind::NoFence);
        }
        let target = self.accumulator(of.columns, accumulate, all)?;
        let signs = (of.signs[0] * of.signs[1]) as f32;
        let mut product = Product { site, half: of.half, left, right, signs, accumulate, target, done: false };
        if self.timing == Timing::Eager {
            self.compute(&mut product);
            let accumulator = self.own_products().accumulators[target].clone().expect("it has a product");
            for (t, (_, brought)) in all.iter_mut().enumerate() {
                accumulator.give(t, brought.d);
            }
        }
        self.own_products().open.push(product);
        Ok(())
    }

    /// The accumulator that the product writes, with one more product under way.
    fn accumulator(
        &mut self,
        columns: usize,
        accumulate: bool,
        all: &mut [(usize, &mut Brought<'_>)],
    ) -> Result<usize, FaultKind> {
        let lazy = self.timing == Timing::Lazy;
        let threads: Vec<usize> = all.iter().map(|(_, x)| x.d.as_ptr() as usize).collect();
        let products = self.own_products();
        let known = |a: &Option<Accumulator>| a.as_ref().is_some_and(|a| a.threads == threads && a.columns == columns);
        if let Some(at) = products.accumulators.iter().position(known) {
            products.accumulators[at].as_mut().expect("it is known").products += 1;
            return Ok(at);
        }
        let mut numbers = vec![0.0; ROWS * columns];
        for (t, (_, brought)) in all.iter_mut().enumerate() {
            for (i, x) in brought.d.iter_mut().enumerate() {
                if accumulate && is_under_way(*x) {
                    return Err(FaultKind::AccumulatorUnderWay { register: format!("d[{i}]") });
                }
                let (row, column) = place(t, i);
                numbers[row * columns + column] = *x;
                if lazy {
                    *x = f32::from_bits(UNDER_WAY);
                }
            }
        }
        let accumulator = Some(Accumulator { threads, columns, numbers, products: 1 });
        match products.accumulators.iter().position(Option::is_none) {
            Some(at) => products.accumulators[at] = accumulator,
            None => products.accumulators.push(accumulator),
        }
        let known = |a: &Option<Accumulator>| a.as_ref().is_some_and(|a| a.threads[0] == all[0].1.d.as_ptr() as usize);
        Ok(products.accumulators.iter().rposition(known).expect("it was just put there"))
    }

    /// Does a product.
    fn compute(&mut self, product: &mut Product) {
        let inner = INNER as usize;
        let columns = self.own_products().accumulators[product.target].as_ref().expect("it has a product").columns;
        let (mut left, mut right) = (vec![0.0; inner * ROWS], vec![0.0; inner * columns]);
        let memory = &self.memory;
        product.right.numbers(product.half, |at| memory.get(at, Operand::PIECE), &mut right);
        match &product.left {
            Left::Shared(a) => a.numbers(product.half, |at| memory.get(at, Operand::PIECE), &mut left),
            Left::Registers(registers) => {
                for (t, pairs) in registers.iter().enumerate() {
                    for (i, pair) in pairs.iter().enumerate() {
                        let (row, column) = left_place(t, i);
                        left[column * ROWS + row] = product.half.widen(*pair as u16);
                        left[(column + 1) * ROWS + row] = product.half.widen((pair >> 16) as u16);
                    }
                }
            }
        }
        let accumulator = self.own_products().accumulators[product.target].as_mut().expect("it has a product");
        if !product.accumulate {
            accumulator.numbers.fill(0.0);
        }
        for (left, right) in left.chunks(ROWS).zip(right.chunks(columns)) {
            for (row, x) in accumulator.numbers.chunks_mut(columns).zip(left) {
                let x = product.signs * x;
                for (d, y) in row.iter_mut().zip(right) {
                    *d += x * y;
                }
            }
        }
        product.done = true;
    }

    fn wait_products(&mut self, groups: usize, all: &mut [(usize, &mut Carried)]) -> Result<(), FaultKind> {
        self.order_warps(all);
        let products = self.own_products();
        if !products.open.is_empty() {
            return Err(FaultKind::NotCommitted);
        }
        products.fenced = false;
        for product in products.groups.iter().flatten() {
            let accumulator = products.accumulators[product.target].as_ref().expect("it has a product");
            check_carried(product, accumulator, all)?;
        }
        let done = products.groups.len().saturating_sub(groups);
        let done: Vec<Product> = products.groups.drain(..done).flatten().collect();
        let read = self.clocks.products(all[0].0 / WARPGROUP);
        for mut product in done {
            if !product.done {
                self.compute(&mut product);
            }
            for operand in [Some(product.right), if let Left::Shared(a) = product.left { Some(a) } else { None }] {
                for piece in operand.iter().flat_map(Operand::pieces) {
                    self.memory.complete_load(read, piece, Operand::PIECE);
                }
            }
            let products = self.own_products();
            let accumulator = products.accumulators[product.target].as_mut().expect("it has a product");
            accumulator.products -= 1;
            if accumulator.products == 0 {
                let accumulator = products.accumulators[product.target].take().expect("it has a product");
                self.give_back(&accumulator, all)?;
            }
        }
        Ok(())
    }

    /// The numbers of an accumulator become those of the registers.
    fn give_back(&mut self, accumulator: &Accumulator, all: &mut [(usize, &mut Carried)]) -> Result<(), FaultKind> {
        let lazy = self.timing == Timing::Lazy;
        for (t, (_, carried)) in all.iter_mut().enumerate() {
            let found = carried.accumulators.iter().find(|x| x.0 as usize == accumulator.threads[t]);
            let &(pointer, len) = found.expect("this was checked");
            // SAFETY: the thread brought this exclusive borrow to the wait and is suspended in it.
            let d = unsafe { core::slice::from_raw_parts_mut(pointer, len) };
            for (i, x) in d.iter().enumerate() {
                let (row, column) = place(t, i);
                let due = accumulator.numbers[row * accumulator.columns + column];
                let want = if lazy { UNDER_WAY } else { due.to_bits() };
                if x.to_bits() != want && !(x.is_nan() && due.is_nan() && !lazy) {
                    return Err(FaultKind::AccumulatorWritten { register: i });
                }
            }
            accumulator.give(t, d);
        }
        Ok(())
    }

    /// Products that nobody waited for.
    pub(crate) fn products_under_way(&self) -> Option<(usize, FaultKind)> {
        for (warpgroup, products) in self.products.iter().enumerate() {
            if !products.open.is_empty() {
                return Some((warpgroup * WARPGROUP, FaultKind::NotCommitted));
            }
            if let Some(product) = products.groups.iter().flatten().next() {
                let what = product.site.to_string();
                return Some((warpgroup * WARPGROUP, FaultKind::EndedEarly { what }));
            }
        }
        None
    }
}

impl Accumulator {
    fn give(&self, t: usize, d: &mut [f32]) {
        for (i, x) in d.iter_mut().enumerate() {
            let (row, column) = place(t, i);
            *x = self.numbers[row * self.columns + column];
        }
    }
}

/// Whether the wait was given what the product uses.
fn check_carried(product: &Product, accumulator: &Accumulator, all: &[(usize, &mut Carried)]) -> Result<(), FaultKind> {
    for (t, (_, carried)) in all.iter().enumerate() {
        let len = accumulator.columns / 2;
        if !carried.accumulators.iter().any(|x| x.0 as usize == accumulator.threads[t] && x.1 == len) {
            return Err(FaultKind::AccumulatorNotCarried { product: product.site.to_string() });
        }
        if let Left::Registers(registers) = &product.left
            && !registers[t].iter().all(|word| carried.operands.contains(word))
        {
            return Err(FaultKind::OperandNotCarried { product: product.site.to_string() });
        }
    }
    Ok(())
}
