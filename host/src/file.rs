//! (module to come)
