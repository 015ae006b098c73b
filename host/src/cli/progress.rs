//! Progress on standard error while a command works: only where that is a terminal.

use std::time::Duration;

use indicatif::{ProgressBar, ProgressStyle};

/// A bar of steps that vanishes when dropped.
pub(super) struct Progress(ProgressBar);

impl Progress {
    /// A bar of `steps` steps; nothing at all unless `wanted`.
    pub fn new(steps: usize, wanted: bool) -> Self {
        if !wanted {
            return Self(ProgressBar::hidden());
        }
        // Draws nothing where standard error is not a terminal.
        let bar = ProgressBar::new(steps as u64);
        if let Ok(style) = ProgressStyle::with_template("{spinner} {pos}/{len} {wide_msg}") {
            bar.set_style(style);
        }
        bar.enable_steady_tick(Duration::from_millis(100));
        Self(bar)
    }

    /// Says what is being done now.
    pub fn start(&self, what: impl Into<String>) {
        self.0.set_message(what.into());
    }

    /// One step is done.
    pub fn done(&self) {
        self.0.inc(1);
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        self.0.finish_and_clear();
    }
}
