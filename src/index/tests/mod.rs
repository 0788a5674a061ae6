mod cases;
mod oracle;
mod property;
mod stress;

pub(super) mod crash;

#[cfg(loom)]
mod models;
