//! The table form in which the instructions are written.
//!
//! A row is `effect name(operand: class type, ..) -> result = "template";` with the operands' names in the template.
//! The effect says what the compiler may assume:
//! * `pure`: a function of the registers (a safe function);
//! * `lane`: pure, but other threads take part;
//! * `read`: reads memory that nobody writes without an opaque instruction in between;
//! * `opaque`: everything else.
//!
//! Results are `name: class type`, `[a, b: class type]` (an array), or `flag` (a bool, from an operand `{flag}`
//! that is 0 or 1).

macro_rules! instructions {
    ($($(#[$meta:meta])* $effect:ident $name:ident $arguments:tt $(-> $result:tt)? = $template:expr;)*) => {
        $($crate::ptx::table::instruction! { $effect [$(#[$meta])*] $name $arguments [$($result)?] $template })*
    };
}

macro_rules! instruction {
    (pure $meta:tt $name:ident $arguments:tt $result:tt $template:expr) => {
        $crate::ptx::table::function! { [] (pure, nomem, nostack) $meta $name $arguments $result $template }
    };
    (lane $meta:tt $name:ident $arguments:tt $result:tt $template:expr) => {
        $crate::ptx::table::function! { [unsafe] (pure, nomem, nostack) $meta $name $arguments $result $template }
    };
    (read $meta:tt $name:ident $arguments:tt $result:tt $template:expr) => {
        $crate::ptx::table::function! { [unsafe] (pure, readonly, nostack) $meta $name $arguments $result $template }
    };
    (opaque $meta:tt $name:ident $arguments:tt $result:tt $template:expr) => {
        $crate::ptx::table::function! { [unsafe] (nostack) $meta $name $arguments $result $template }
    };
}

macro_rules! function {
    // No result.
    ([$($safety:tt)?] $options:tt [$($meta:tt)*] $name:ident ($($operand:ident: $class:ident $ty:ty),*) []
        $template:expr) => {
        $($meta)*
        #[inline(always)]
        pub $($safety)? fn $name($($operand: $ty),*) {
            // SAFETY: the caller's, see the module; without `unsafe` only registers are touched.
            unsafe { asm!($template, $($operand = in($class) $operand,)* options $options) }
        }
    };
    // A bool.
    ([$($safety:tt)?] $options:tt [$($meta:tt)*] $name:ident ($($operand:ident: $class:ident $ty:ty),*) [flag]
        $template:expr) => {
        $($meta)*
        #[inline(always)]
        pub $($safety)? fn $name($($operand: $ty),*) -> bool {
            let flag: u32;
            // SAFETY: the caller's, see the module; without `unsafe` only registers are touched.
            unsafe { asm!($template, $($operand = in($class) $operand,)* flag = out(reg32) flag, options $options) }
            flag != 0
        }
    };
    // One value.
    ([$($safety:tt)?] $options:tt [$($meta:tt)*] $name:ident ($($operand:ident: $class:ident $ty:ty),*)
        [($out:ident: $out_class:ident $out_ty:ty)] $template:expr) => {
        $($meta)*
        #[inline(always)]
        pub $($safety)? fn $name($($operand: $ty),*) -> $out_ty {
            let $out: $out_ty;
            // SAFETY: the caller's, see the module; without `unsafe` only registers are touched.
            unsafe { asm!($template, $($operand = in($class) $operand,)* $out = out($out_class) $out, options $options) }
            $out
        }
    };
    // Several values of one type.
    ([$($safety:tt)?] $options:tt [$($meta:tt)*] $name:ident ($($operand:ident: $class:ident $ty:ty),*)
        [[$($out:ident),* : $out_class:ident $out_ty:ty]] $template:expr) => {
        $($meta)*
        #[inline(always)]
        pub $($safety)? fn $name($($operand: $ty),*) -> [$out_ty; [$(stringify!($out)),*].len()] {
            $(let $out: $out_ty;)*
            // SAFETY: the caller's, see the module; without `unsafe` only registers are touched.
            unsafe {
                asm!($template, $($operand = in($class) $operand,)* $($out = out($out_class) $out,)* options $options)
            }
            [$($out),*]
        }
    };
}

pub(super) use {function, instruction, instructions};
