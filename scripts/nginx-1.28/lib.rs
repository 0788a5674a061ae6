//! Empty: the package is its dependency.
