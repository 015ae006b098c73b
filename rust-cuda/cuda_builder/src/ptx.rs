//! PTX as text: its functions, what they call, and the launch bounds of its kernels.

use std::collections::{BTreeMap, BTreeSet};

use crate::BuildError;
use crate::ir::Bounds;

/// A function of a module.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Function {
    /// Whether it can be launched.
    pub entry: bool,
    /// Its lines between the braces, in order.
    pub body: Vec<String>,
}

impl Function {
    /// Whether an array of it is in local memory.
    pub fn has_local(&self) -> bool {
        self.body.iter().any(|line| line.trim_start().starts_with(".local "))
    }

    /// How many of its instructions start with `name`, predicated or not.
    pub fn count(&self, name: &str) -> usize {
        let instructions = self.body.iter().flat_map(|line| line.split(['{', ';']));
        instructions
            .filter(|instruction| {
                let text = instruction.trim_start();
                let text = if text.starts_with('@') { text.split_once(' ').map_or("", |(_, rest)| rest) } else { text };
                text.trim_start().starts_with(name)
            })
            .count()
    }

    /// The functions that it calls, once for each call.
    fn calls(&self) -> impl Iterator<Item = &str> {
        self.body.iter().map(|line| line.trim_start()).filter(|line| line.starts_with("call")).filter_map(|line| {
            let operands = line.split_once(char::is_whitespace)?.1.trim_start();
            // `call (result), name, (arguments);`, with or without the parentheses.
            let operands = match operands.strip_prefix('(') {
                Some(rest) => rest.split_once("),")?.1,
                None => operands,
            };
            operands.trim_start().split([',', ';']).next()
        })
    }
}

/// A module taken apart.
#[derive(Debug, Clone, Default)]
pub struct Module {
    /// Functions with a body, by name.
    pub functions: BTreeMap<String, Function>,
    /// Functions that another module must define.
    pub external: BTreeSet<String>,
}

impl Module {
    /// Takes apart what llc prints: heads over several lines, then a body between lines of one brace.
    pub fn parse(ptx: &str) -> Module {
        let mut module = Module::default();
        let mut head = String::new();
        let mut current: Option<(String, Function)> = None;
        for line in ptx.lines() {
            if let Some((name, mut function)) = current.take() {
                if line.starts_with('}') {
                    module.functions.insert(name, function);
                } else {
                    function.body.push(line.to_owned());
                    current = Some((name, function));
                }
                continue;
            }
            let is_head = |keyword: &str| line.starts_with('.') && line.contains(keyword);
            if is_head(".func") || is_head(".entry") {
                head.clear();
            }
            if line == "{" {
                if let Some(name) = name_in_head(&head) {
                    current = Some((name, Function { entry: head.contains(".entry"), body: Vec::new() }));
                }
                head.clear();
            } else {
                head.push_str(line);
                head.push(' ');
                if head.starts_with(".extern .func") && line.ends_with(';') {
                    module.external.extend(name_in_head(&head));
                    head.clear();
                }
            }
        }
        module
    }

    /// The functions that `name` reaches by calls, itself included, and how often each is called.
    pub fn reached(&self, name: &str) -> BTreeMap<&str, usize> {
        let mut reached = BTreeMap::new();
        let mut open: Vec<&str> =
            self.functions.get_key_value(name).map(|(name, _)| name.as_str()).into_iter().collect();
        let mut seen: BTreeSet<&str> = open.iter().copied().collect();
        while let Some(name) = open.pop() {
            reached.entry(name).or_insert(0);
            let Some(function) = self.functions.get(name) else { continue };
            for callee in function.calls() {
                *reached.entry(callee).or_insert(0) += 1;
                if seen.insert(callee) {
                    open.push(callee);
                }
            }
        }
        reached
    }
}

/// The function's name in `.visible .func (.param .b32 r) name(..)` or `.entry name(..)`.
fn name_in_head(head: &str) -> Option<String> {
    let rest = head.split_once(".entry ").or_else(|| head.split_once(".func "))?.1.trim_start();
    let rest = if rest.starts_with('(') { rest.split_once(')')?.1.trim_start() } else { rest };
    let name = rest.split(|c: char| c == '(' || c == ';' || c.is_whitespace()).next()?;
    (!name.is_empty()).then(|| name.to_owned())
}

/// Writes the launch bounds of `kernels` between their parameters and bodies.
pub fn put_bounds(ptx: &str, kernels: &BTreeMap<String, Bounds>) -> Result<String, BuildError> {
    let mut text = ptx.to_owned();
    for (kernel, bounds) in kernels {
        let directives: String = [
            (".reqntid", bounds.threads),
            (".maxnreg", bounds.registers),
            (".minnctapersm", bounds.blocks_per_sm),
            (".reqnctapercluster", bounds.cluster),
        ]
        .iter()
        .filter_map(|(name, value)| value.map(|value| format!("{name} {value}\n")))
        .collect();
        let wrong = |why| BuildError::Ptx { kernel: kernel.clone(), why };
        let head = text.find(&format!(".entry {kernel}(")).ok_or_else(|| wrong("there is no such entry"))?;
        let brace = head + text[head..].find("\n{").ok_or_else(|| wrong("it has no body"))? + 1;
        text.insert_str(brace, &directives);
    }
    Ok(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    const PTX: &str = ".version 8.3
.extern .func  (.param .b32 func_retval0) dl_my_pe
()
;
.visible .func  (.param .b32 func_retval0) helper(
\t.param .b32 helper_param_0
)
{
\t.local .align 4 .b8 \t__local_depot0[16];
\tret;
}
.visible .entry step(
\t.param .u64 step_param_0
)
{
\tbar.sync 0;
\t@%p1 bar.sync \t0;
\t{ .reg .pred p; bar.sync 1, 32; }
\t// bar.sync in a comment
\tcall.uni (retval0), helper, (param0);
\tcall.uni nothing, ();
\tcall.uni (retval0), dl_my_pe, ();
\tret;
}
";

    #[test]
    fn a_module_is_taken_apart() {
        let module = Module::parse(PTX);
        assert_eq!(module.external.iter().collect::<Vec<_>>(), ["dl_my_pe"]);
        assert!(module.functions["step"].entry && !module.functions["helper"].entry);
        assert_eq!(module.functions["step"].count("bar.sync"), 3);
        assert!(module.functions["helper"].has_local() && !module.functions["step"].has_local());
        let reached = module.reached("step");
        assert_eq!(reached.keys().collect::<Vec<_>>(), [&"dl_my_pe", &"helper", &"nothing", &"step"]);
    }

    #[test]
    fn bounds_stand_before_the_body() {
        let bounds = Bounds { threads: Some(128), registers: Some(168), ..Bounds::default() };
        let text = put_bounds(PTX, &BTreeMap::from([("step".into(), bounds)])).unwrap();
        assert!(text.contains("step_param_0\n)\n.reqntid 128\n.maxnreg 168\n{\n\tbar.sync"), "{text}");
        let error = put_bounds(PTX, &BTreeMap::from([("other".into(), bounds)])).unwrap_err();
        assert!(error.to_string().contains("other"), "{error}");
    }
}
