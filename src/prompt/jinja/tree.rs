//! Walking a template's syntax tree.

use minijinja::machinery::ast::{Call, CallArg, Expr, Stmt};

#[derive(Clone, Copy)]
pub(super) enum Node<'t, 's> {
    Stmt(&'t Stmt<'s>),
    Expr(&'t Expr<'s>),
    Call(&'t Call<'s>),
}

/// Calls `visit` for a node and everything below it, parents first.
pub(super) fn walk<'t, 's>(node: Node<'t, 's>, visit: &mut impl FnMut(Node<'t, 's>)) {
    visit(node);
    if let Node::Expr(Expr::Call(call)) = node {
        visit(Node::Call(call));
    }
    children(node, &mut |child| walk(child, visit));
}

/// Calls `visit` for each direct child.
pub(super) fn children<'t, 's>(node: Node<'t, 's>, visit: &mut dyn FnMut(Node<'t, 's>)) {
    match node {
        Node::Stmt(stmt) => of_stmt(stmt, visit),
        Node::Expr(expr) => of_expr(expr, visit),
        Node::Call(call) => of_call(&call.expr, &call.args, visit),
    }
}

fn of_stmt<'t, 's>(stmt: &'t Stmt<'s>, visit: &mut dyn FnMut(Node<'t, 's>)) {
    let mut all = |bodies: &[&'t [Stmt<'s>]], exprs: &[&'t Expr<'s>]| {
        exprs.iter().for_each(|expr| visit(Node::Expr(expr)));
        bodies.iter().copied().flatten().for_each(|stmt| visit(Node::Stmt(stmt)));
    };
    match stmt {
        Stmt::Template(node) => all(&[&node.children], &[]),
        Stmt::EmitExpr(node) => all(&[], &[&node.expr]),
        Stmt::ForLoop(node) => {
            let filter: Vec<_> = node.filter_expr.iter().collect();
            all(&[], &[&node.target, &node.iter]);
            all(&[&node.body, &node.else_body], &filter);
        }
        Stmt::IfCond(node) => all(&[&node.true_body, &node.false_body], &[&node.expr]),
        Stmt::WithBlock(node) => {
            node.assignments.iter().for_each(|(name, value)| all(&[], &[name, value]));
            all(&[&node.body], &[]);
        }
        Stmt::Set(node) => all(&[], &[&node.target, &node.expr]),
        Stmt::SetBlock(node) => {
            let filter: Vec<_> = node.filter.iter().collect();
            all(&[&node.body], &[&node.target]);
            all(&[], &filter);
        }
        Stmt::AutoEscape(node) => all(&[&node.body], &[&node.enabled]),
        Stmt::FilterBlock(node) => all(&[&node.body], &[&node.filter]),
        Stmt::Block(node) => all(&[&node.body], &[]),
        Stmt::Import(node) => all(&[], &[&node.expr, &node.name]),
        Stmt::FromImport(node) => all(&[], &[&node.expr]),
        Stmt::Extends(node) => all(&[], &[&node.name]),
        Stmt::Include(node) => all(&[], &[&node.name]),
        Stmt::Macro(node) => {
            node.args.iter().chain(&node.defaults).for_each(|expr| all(&[], &[expr]));
            all(&[&node.body], &[]);
        }
        Stmt::CallBlock(node) => {
            let decl = &node.macro_decl;
            decl.args.iter().chain(&decl.defaults).for_each(|expr| all(&[], &[expr]));
            all(&[&decl.body], &[]);
            visit(Node::Call(&node.call));
        }
        Stmt::Do(node) => visit(Node::Call(&node.call)),
        Stmt::EmitRaw(_) | Stmt::Continue(_) | Stmt::Break(_) => {}
    }
}

fn of_expr<'t, 's>(expr: &'t Expr<'s>, visit: &mut dyn FnMut(Node<'t, 's>)) {
    let mut one = |expr: &'t Expr<'s>| visit(Node::Expr(expr));
    match expr {
        Expr::Var(_) | Expr::Const(_) => {}
        Expr::Slice(node) => {
            one(&node.expr);
            [&node.start, &node.stop, &node.step].into_iter().flatten().for_each(one);
        }
        Expr::UnaryOp(node) => one(&node.expr),
        Expr::BinOp(node) => [&node.left, &node.right].into_iter().for_each(one),
        Expr::Compare(node) => {
            one(&node.expr);
            node.ops.iter().for_each(|op| one(&op.expr));
        }
        Expr::IfExpr(node) => {
            [&node.test_expr, &node.true_expr].into_iter().for_each(&mut one);
            node.false_expr.iter().for_each(one);
        }
        Expr::Filter(node) => {
            node.expr.iter().for_each(one);
            node.args.iter().for_each(|arg| visit(Node::Expr(argument(arg))));
        }
        Expr::Test(node) => of_call(&node.expr, &node.args, visit),
        Expr::GetAttr(node) => one(&node.expr),
        Expr::GetItem(node) => [&node.expr, &node.subscript_expr].into_iter().for_each(one),
        Expr::Call(node) => of_call(&node.expr, &node.args, visit),
        Expr::List(node) => node.items.iter().for_each(one),
        Expr::Tuple(node) => node.items.iter().for_each(one),
        Expr::Map(node) => node.keys.iter().chain(&node.values).for_each(one),
    }
}

fn of_call<'t, 's>(
    callee: &'t Expr<'s>,
    args: &'t [CallArg<'s>],
    visit: &mut dyn FnMut(Node<'t, 's>),
) {
    visit(Node::Expr(callee));
    args.iter().for_each(|arg| visit(Node::Expr(argument(arg))));
}

pub(super) fn argument<'t, 's>(arg: &'t CallArg<'s>) -> &'t Expr<'s> {
    match arg {
        CallArg::Pos(expr)
        | CallArg::Kwarg(_, expr)
        | CallArg::PosSplat(expr)
        | CallArg::KwargSplat(expr) => expr,
    }
}
