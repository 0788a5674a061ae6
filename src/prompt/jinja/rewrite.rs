//! Changes to a template's text before it is compiled, so that its operators and loops do what
//! Python's do: `a + b` becomes `(a)|__add(b)`, a loop's `in x` becomes `in (x)|__each`.

use minijinja::machinery::ast::{BinOp, BinOpKind, Expr, Spanned, Stmt};

use super::filters::{ADD, CONCAT, EACH, MOD};
use super::tree::{Node, walk};

/// Jinja2's line ends; and the `generation` tag, which only marks its contents, as a plain scope.
pub(super) fn normalize(source: &str) -> String {
    let source = source.replace("\r\n", "\n").replace('\r', "\n");
    let mut out = String::with_capacity(source.len());
    let mut rest = source.as_str();
    while let Some(at) = rest.find("{%") {
        out.push_str(&rest[..at]);
        rest = &rest[at..];
        let Some((open, name, close)) = bare_tag(rest) else {
            out.push_str("{%");
            rest = &rest[2..];
            continue;
        };
        let name = match name {
            "generation" => "with",
            "endgeneration" => "endwith",
            other => other,
        };
        out.push_str(&format!("{open} {name} {close}"));
        rest = &rest[bare_tag_len(rest)..];
    }
    out.push_str(rest);
    out
}

pub(super) fn has_generation_blocks(source: &str) -> bool {
    let tags = source.match_indices("{%").filter_map(|(at, _)| bare_tag(&source[at..]));
    tags.into_iter().any(|(_, name, _)| name == "generation")
}

/// The parts of a tag that is one word: `{%-`, `word`, `-%}`.
fn bare_tag(text: &str) -> Option<(&str, &str, &str)> {
    let end = bare_tag_len(text);
    let inner = text.get(2..end.checked_sub(2)?)?;
    let (open, inner) = match inner.strip_prefix(['-', '+']) {
        Some(inner) => (&text[..3], inner),
        None => (&text[..2], inner),
    };
    let (close, inner) = match inner.strip_suffix(['-', '+']) {
        Some(inner) => (&text[end - 3..end], inner),
        None => (&text[end - 2..end], inner),
    };
    let name = inner.trim();
    name.bytes().all(|byte| byte.is_ascii_alphabetic()).then_some((open, name, close))
}

fn bare_tag_len(text: &str) -> usize {
    text.find("%}").map_or(0, |at| at + 2)
}

/// The text with every operator and loop changed that `template`, its syntax tree, has.
pub(super) fn operators(source: &str, template: &Stmt<'_>) -> String {
    let mut edits = Vec::new();
    walk(Node::Stmt(template), &mut |node| match node {
        Node::Expr(Expr::BinOp(node)) => binary(source, node, &mut edits),
        Node::Stmt(Stmt::ForLoop(node)) => {
            edits.push(Edit::insert(start(&node.iter), "("));
            edits.push(Edit::insert(end(&node.iter), format!(")|{EACH}")));
        }
        _ => {}
    });
    apply(source, edits)
}

fn binary(source: &str, node: &Spanned<BinOp<'_>>, edits: &mut Vec<Edit>) {
    let (operator, filter) = match node.op {
        BinOpKind::Add => ('+', ADD),
        BinOpKind::Concat => ('~', CONCAT),
        BinOpKind::Rem => ('%', MOD),
        _ => return,
    };
    // Between the operands there is nothing but the operator, space and parentheses.
    let (from, to) = (end(&node.left), start(&node.right));
    let Some(at) = source.get(from..to).and_then(|gap| gap.find(operator)) else { return };
    let at = from + at;
    edits.push(Edit::insert(start(&node.left), "("));
    edits.push(Edit { at, len: 1, text: format!(")|{filter}(") });
    edits.push(Edit::insert(node.span().end_offset as usize, ")"));
}

/// Where an expression's first token is. Parentheses before it may be left out: one more among
/// them does the same wherever it stands.
fn start(expr: &Expr<'_>) -> usize {
    let own = expr.span().start_offset as usize;
    let first = match expr {
        Expr::Filter(node) => node.expr.as_ref(),
        Expr::Test(node) => Some(&node.expr),
        Expr::Compare(node) => Some(&node.expr),
        Expr::IfExpr(node) => Some(&node.true_expr),
        Expr::GetAttr(node) => Some(&node.expr),
        Expr::GetItem(node) => Some(&node.expr),
        Expr::Slice(node) => Some(&node.expr),
        Expr::Call(node) => Some(&node.expr),
        // `x is not y` is one that begins with its operand.
        Expr::UnaryOp(node) => return own.min(start(&node.expr)),
        _ => None,
    };
    first.map_or(own, start)
}

fn end(expr: &Expr<'_>) -> usize {
    expr.span().end_offset as usize
}

struct Edit {
    at: usize,
    len: usize,
    text: String,
}

impl Edit {
    fn insert(at: usize, text: impl Into<String>) -> Edit {
        Edit { at, len: 0, text: text.into() }
    }
}

/// At one place what closes goes before what opens; the tree gives outer nodes first, so what
/// closes there is reversed.
fn apply(source: &str, edits: Vec<Edit>) -> String {
    let (closing, mut opening): (Vec<Edit>, Vec<Edit>) =
        edits.into_iter().partition(|edit| edit.text.starts_with(')'));
    let mut all: Vec<Edit> = closing.into_iter().rev().collect();
    all.append(&mut opening);
    all.sort_by_key(|edit| edit.at);
    let mut out = String::with_capacity(source.len() * 2);
    let mut done = 0;
    for edit in all {
        out.push_str(&source[done..edit.at]);
        out.push_str(&edit.text);
        done = edit.at + edit.len;
    }
    out.push_str(&source[done..]);
    out
}
