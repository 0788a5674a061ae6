//! Which form of message content a template wants, found as the engine finds it: by a loop over
//! the content.

use minijinja::machinery::ast::{Call, CallArg, Expr, ForLoop, Macro, Stmt};

use super::tree::{Node, argument, walk};

/// The form of a message's `content`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ContentFormat {
    /// One string; text parts are joined by newlines.
    String,
    /// A list of parts.
    Parts,
}

/// An assignment to something that is no plain name: there the engine falls back to strings.
struct OddTarget;

/// The nodes of a template that matter here.
#[derive(Default)]
struct Nodes<'t, 's> {
    sets: Vec<(&'t Expr<'s>, &'t Expr<'s>)>,
    loops: Vec<&'t ForLoop<'s>>,
    macros: Vec<&'t Macro<'s>>,
    calls: Vec<&'t Call<'s>>,
}

pub(super) fn detect(template: &Stmt<'_>) -> ContentFormat {
    let nodes = collect(Node::Stmt(template));
    match loops_over_content(&nodes) {
        Ok(true) => ContentFormat::Parts,
        Ok(false) | Err(OddTarget) => ContentFormat::String,
    }
}

fn collect<'t, 's>(root: Node<'t, 's>) -> Nodes<'t, 's> {
    let mut nodes = Nodes::default();
    walk(root, &mut |node| match node {
        Node::Stmt(Stmt::Set(set)) => nodes.sets.push((&set.target, &set.expr)),
        Node::Stmt(Stmt::ForLoop(node)) => nodes.loops.push(node),
        Node::Stmt(Stmt::Macro(node)) => nodes.macros.push(node),
        Node::Call(call) => nodes.calls.push(call),
        _ => {}
    });
    nodes
}

fn loops_over_content(nodes: &Nodes<'_, '_>) -> Result<bool, OddTarget> {
    let messages = aliases_of_messages(nodes)?;
    let mut message = Vec::new();
    for node in &nodes.loops {
        if messages.iter().any(|name| reads(&node.iter, name, None)) {
            message.push(plain_name(&node.target)?);
        }
    }
    let is_content =
        |expr: &Expr<'_>| message.iter().any(|name| reads(expr, name, Some("content")));
    // Loops in macros, each with the parameters of its macro that are given a content.
    let mut in_macros: Vec<(&ForLoop<'_>, Vec<&str>)> = Vec::new();
    for node in &nodes.macros {
        let params = content_params(nodes, node, &is_content);
        for stmt in &node.body {
            let inner = collect(Node::Stmt(stmt)).loops;
            in_macros.extend(inner.into_iter().map(|inner| (inner, params.clone())));
        }
    }
    for node in &nodes.loops {
        let mut enclosing =
            in_macros.iter().filter(|(inner, _)| std::ptr::eq(*inner, *node)).peekable();
        let free = enclosing.peek().is_none();
        let over = variable(&node.iter).is_some_and(|name| {
            (free && name == "content") || enclosing.any(|(_, params)| params.contains(&name))
        });
        if over || is_content(&node.iter) {
            return plain_name(&node.target).map(|_| true);
        }
    }
    Ok(false)
}

/// `messages` and every name that is assigned from it.
fn aliases_of_messages<'s>(nodes: &Nodes<'_, 's>) -> Result<Vec<&'s str>, OddTarget> {
    let mut names = vec!["messages"];
    let mut at = 0;
    while let Some(&name) = names.get(at) {
        at += 1;
        for (target, expr) in &nodes.sets {
            if reads(expr, name, None) {
                let alias = plain_name(target)?;
                if !names.contains(&alias) {
                    names.push(alias);
                }
            }
        }
    }
    Ok(names)
}

/// The parameters of a macro that some call gives a message's content.
fn content_params<'s>(
    nodes: &Nodes<'_, 's>,
    node: &Macro<'s>,
    is_content: &dyn Fn(&Expr<'_>) -> bool,
) -> Vec<&'s str> {
    let params: Vec<&str> = node.args.iter().filter_map(variable).collect();
    let mut found = Vec::new();
    for call in nodes.calls.iter().filter(|call| variable(&call.expr) == Some(node.name)) {
        for (at, arg) in call.args.iter().enumerate() {
            let param = match arg {
                CallArg::Kwarg(name, _) => params.iter().find(|param| *param == name),
                _ => params.get(at),
            };
            found.extend(param.filter(|_| is_content(argument(arg))));
        }
    }
    found
}

/// Whether an expression is a variable, or its field `key`, seen through filters, tests and slices.
fn reads(expr: &Expr<'_>, name: &str, key: Option<&str>) -> bool {
    match expr {
        Expr::Filter(node) => node.expr.as_ref().is_some_and(|expr| reads(expr, name, key)),
        Expr::Test(node) => reads(&node.expr, name, key),
        Expr::Slice(node) => reads(&node.expr, name, key),
        Expr::Var(_) => key.is_none() && variable(expr) == Some(name),
        Expr::GetAttr(node) => key == Some(node.name) && variable(&node.expr) == Some(name),
        Expr::GetItem(node) => match &node.subscript_expr {
            Expr::Const(field) => {
                key.is_some_and(|key| field.value.as_str() == Some(key))
                    && variable(&node.expr) == Some(name)
            }
            _ => false,
        },
        _ => false,
    }
}

fn variable<'s>(expr: &Expr<'s>) -> Option<&'s str> {
    if let Expr::Var(node) = expr { Some(node.id) } else { None }
}

fn plain_name<'s>(expr: &Expr<'s>) -> Result<&'s str, OddTarget> {
    variable(expr).ok_or(OddTarget)
}
