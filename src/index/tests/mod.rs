mod oracle;
mod property;

pub(super) mod crash;
