mod cases;
mod models;
mod oracle;
mod property;
mod stress;

pub(super) mod crash;
pub(super) mod interleave;
