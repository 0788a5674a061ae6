//! Which variables a template takes from outside: the engine drops a request's template arguments
//! that are not among them.
//!
//! Jinja2 decides this per frame (the template, a loop, a macro, …): a name is taken from outside if
//! it is read in a frame before that frame or one around it assigns it, or if only a branch of an
//! `if` assigns it.

use std::collections::HashSet;

use minijinja::machinery::ast::{Expr, Stmt};

use super::tree::{Node, children, walk};

/// Names that Jinja2 itself defines.
const GLOBALS: [&str; 6] = ["range", "dict", "lipsum", "cycler", "joiner", "namespace"];

const ANY_ARGUMENTS: [&str; 2] = ["kwargs", "varargs"];

pub(super) fn undeclared(template: &Stmt<'_>) -> HashSet<String> {
    let mut analysis = Analysis::default();
    let Stmt::Template(template) = template else { return HashSet::new() };
    analysis.frame(Frame::default(), &template.children);
    analysis.outside.into_iter().filter(|name| !GLOBALS.contains(name)).map(str::to_owned).collect()
}

/// Whether a macro reads the names that stand for its surplus arguments.
pub(super) fn takes_any_arguments(template: &Stmt<'_>) -> bool {
    let mut found = false;
    walk(Node::Stmt(template), &mut |node| {
        if let Node::Stmt(Stmt::Macro(node)) = node {
            node.body.iter().for_each(|stmt| {
                walk(Node::Stmt(stmt), &mut |node| {
                    found |= matches!(node, Node::Expr(Expr::Var(var)) if ANY_ARGUMENTS.contains(&var.id));
                });
            });
        }
    });
    found
}

/// Whether a loop with an `else` may leave an iteration early: Jinja2 takes that `else` unless an
/// iteration came to its end.
pub(super) fn has_odd_else(template: &Stmt<'_>) -> bool {
    let mut found = false;
    walk(Node::Stmt(template), &mut |node| {
        if let Node::Stmt(Stmt::ForLoop(node)) = node {
            found |= !node.else_body.is_empty() && leaves_early(&node.body);
        }
    });
    found
}

fn leaves_early(body: &[Stmt<'_>]) -> bool {
    body.iter().any(|stmt| match stmt {
        Stmt::Break(_) | Stmt::Continue(_) => true,
        Stmt::IfCond(node) => leaves_early(&node.true_body) || leaves_early(&node.false_body),
        Stmt::WithBlock(node) => leaves_early(&node.body),
        Stmt::FilterBlock(node) => leaves_early(&node.body),
        _ => false,
    })
}

#[derive(Default)]
struct Analysis<'s> {
    outside: HashSet<&'s str>,
    around: Vec<HashSet<&'s str>>,
}

#[derive(Clone, Default)]
struct Frame<'s> {
    known: HashSet<&'s str>,
    assigned: HashSet<&'s str>,
}

/// A frame within a frame: the names that it begins with, and its statements.
struct Inner<'t, 's> {
    targets: Vec<&'t Expr<'s>>,
    names: &'static [&'static str],
    reads: Vec<&'t Expr<'s>>,
    body: &'t [Stmt<'s>],
}

impl<'s> Analysis<'s> {
    /// Jinja2 looks at all of a frame before it enters the frames within.
    fn frame<'t>(&mut self, mut frame: Frame<'s>, body: &'t [Stmt<'s>]) {
        let mut inner = Vec::new();
        self.statements(body, &mut frame, &mut inner);
        self.around.push(frame.known);
        for inner in inner {
            let mut frame = Frame::default();
            frame.known.extend(inner.names);
            inner.targets.iter().for_each(|target| self.store(target, &mut frame));
            inner.reads.iter().for_each(|expr| self.read(Node::Expr(expr), &mut frame));
            self.frame(frame, inner.body);
        }
        self.around.pop();
    }

    fn statements<'t>(
        &mut self,
        body: &'t [Stmt<'s>],
        frame: &mut Frame<'s>,
        inner: &mut Vec<Inner<'t, 's>>,
    ) {
        for stmt in body {
            self.statement(stmt, frame, inner);
        }
    }

    fn statement<'t>(
        &mut self,
        stmt: &'t Stmt<'s>,
        frame: &mut Frame<'s>,
        inner: &mut Vec<Inner<'t, 's>>,
    ) {
        let plain = |body| Inner { targets: Vec::new(), names: &[], reads: Vec::new(), body };
        match stmt {
            Stmt::Set(node) => {
                self.read(Node::Expr(&node.expr), frame);
                self.store(&node.target, frame);
            }
            Stmt::SetBlock(node) => {
                self.store(&node.target, frame);
                inner.push(Inner { reads: node.filter.iter().collect(), ..plain(&node.body) });
            }
            Stmt::IfCond(node) => {
                self.read(Node::Expr(&node.expr), frame);
                self.branches(&[&node.true_body, &node.false_body], frame, inner);
            }
            Stmt::ForLoop(node) => {
                self.read(Node::Expr(&node.iter), frame);
                let reads = node.filter_expr.iter().collect();
                let targets = vec![&node.target];
                inner.push(Inner { targets, names: &["loop"], reads, body: &node.body });
                inner.push(plain(&node.else_body));
            }
            Stmt::WithBlock(node) => {
                node.assignments.iter().for_each(|(_, value)| self.read(Node::Expr(value), frame));
                let targets = node.assignments.iter().map(|(name, _)| name).collect();
                inner.push(Inner { targets, ..plain(&node.body) });
            }
            Stmt::Macro(node) => {
                self.assign(node.name, frame);
                let names = &["caller", "kwargs", "varargs"];
                let (targets, reads) = (node.args.iter().collect(), node.defaults.iter().collect());
                inner.push(Inner { targets, names, reads, body: &node.body });
            }
            Stmt::CallBlock(node) => {
                self.read(Node::Call(&node.call), frame);
                let decl = &node.macro_decl;
                let (targets, reads) = (decl.args.iter().collect(), decl.defaults.iter().collect());
                inner.push(Inner { targets, names: &[], reads, body: &decl.body });
            }
            Stmt::FilterBlock(node) => {
                self.read(Node::Expr(&node.filter), frame);
                inner.push(plain(&node.body));
            }
            other => self.read(Node::Stmt(other), frame),
        }
    }

    fn branches<'t>(
        &mut self,
        branches: &[&'t [Stmt<'s>]],
        frame: &mut Frame<'s>,
        inner: &mut Vec<Inner<'t, 's>>,
    ) {
        let before = frame.clone();
        for branch in branches {
            let mut copy = before.clone();
            self.statements(branch, &mut copy, inner);
            frame.known.extend(copy.known);
            frame.assigned.extend(copy.assigned);
        }
        for &name in frame.assigned.difference(&before.assigned) {
            if !self.around.iter().any(|known| known.contains(name)) {
                self.outside.insert(name);
            }
        }
    }

    /// Every variable in an expression is read.
    fn read(&mut self, node: Node<'_, 's>, frame: &mut Frame<'s>) {
        if let Node::Expr(Expr::Var(var)) = node {
            let known = frame.known.contains(var.id);
            if !known && !self.around.iter().any(|known| known.contains(var.id)) {
                frame.known.insert(var.id);
                self.outside.insert(var.id);
            }
        }
        children(node, &mut |child| self.read(child, frame));
    }

    /// A target: a name, several of them, or a field of a namespace, which is read.
    fn store(&mut self, target: &Expr<'s>, frame: &mut Frame<'s>) {
        match target {
            Expr::Var(var) => self.assign(var.id, frame),
            Expr::List(list) => list.items.iter().for_each(|item| self.store(item, frame)),
            Expr::Tuple(tuple) => tuple.items.iter().for_each(|item| self.store(item, frame)),
            other => self.read(Node::Expr(other), frame),
        }
    }

    fn assign(&mut self, name: &'s str, frame: &mut Frame<'s>) {
        frame.known.insert(name);
        frame.assigned.insert(name);
    }
}
