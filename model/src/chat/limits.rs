//! Limits of templates. A template comes with a model, and must not be able to end or hang the program.
//!
//! The engine counts instructions ([`FUEL`]). The rest is counted here. [`Guard`] rewrites the parsed template: it puts
//! a call around each value that an operator, a filter, a test or a method is given, and that call examines the value
//! before anything is made of it. This bounds the length of each text, the nesting of values (a value that holds itself
//! exceeds any bound), and all work together. Operations that can make more text than they are given (`indent`,
//! `replace`, `join`, `format`, …) have a check of their own.

use std::cell::Cell;

use minijinja::machinery::ast::{self, CallArg, Expr, Spanned, Stmt};
use minijinja::machinery::{CodeGenerator, parse};
use minijinja::value::{Kwargs, Rest, Value, ValueKind};
use minijinja::{Environment, Error, ErrorKind, Output, State, escape_formatter};

/// Instructions that a rendering may execute.
pub(super) const FUEL: u64 = 5_000_000;
/// Largest template, in bytes. The longest that models have are a tenth of it.
pub(super) const SOURCE: usize = 256 << 10;
/// Deepest nesting of expressions and statements.
const NESTING: usize = 500;
/// Largest value, in bytes. It leaves room for a line of a batch and what a template puts around it.
pub(super) const BYTES: u64 = 80 << 20;
/// Bytes of all values that a rendering examines, together.
const WORK: u64 = 1 << 30;
/// Deepest nesting of values.
const DEPTH: usize = 200;
/// Bytes that each value counts for, beside its text.
const VALUE: u64 = 128;
/// Bytes that each byte of a text inside another value counts for: written out, such a text is longer.
const WITHIN: u64 = 4;
/// Bytes that each part counts for when a text becomes a list.
const PART: u64 = 24;
/// The largest number that may be a width, or a number of parts.
const WIDTH: i64 = 10_000;

/// Names of the functions that examine values. They hold spaces, so that a template cannot write them.
const WHOLE: &str = "within limits";
const TOP: &str = "within limits at the top";
const PARTS: &str = "within limits in parts";
/// Examines what is put into a namespace.
const KEPT: &str = "within limits in a namespace";

thread_local! {
    /// Work that is left to the rendering in this thread.
    static LEFT: Cell<u64> = const { Cell::new(WORK) };
}

fn refuse(what: impl Into<String>) -> Error {
    Error::new(ErrorKind::InvalidOperation, what.into())
}

pub(super) fn too_long() -> Error {
    refuse(format!("it makes a value of more than {} MiB", BYTES >> 20))
}

/// Subtracts work from what is left; fails if there is too little.
fn spend(work: u64) -> Result<(), Error> {
    let left = LEFT.get().checked_sub(work);
    LEFT.set(left.unwrap_or(0));
    left.map(|_| ()).ok_or_else(|| refuse(format!("it handles more than {} MiB of text", WORK >> 20)))
}

/// Examines a value and everything in it.
fn whole(value: &Value) -> Result<(), Error> {
    fn walk(value: &Value, depth: usize, bytes: &mut u64) -> Result<(), Error> {
        if depth > DEPTH {
            return Err(refuse(format!("it makes a value with more than {DEPTH} others within each other")));
        }
        let length = value.as_bytes().map_or(0, <[u8]>::len) as u64;
        let size = VALUE + if depth == 0 { length } else { WITHIN * length };
        spend(size)?;
        *bytes += size;
        if *bytes > BYTES {
            return Err(too_long());
        }
        match value.kind() {
            ValueKind::Seq | ValueKind::Iterable => {
                value.try_iter()?.try_for_each(|item| walk(&item, depth + 1, bytes))
            }
            ValueKind::Map => value.try_iter()?.try_for_each(|key| {
                walk(&key, depth + 1, bytes)?;
                walk(&value.get_item(&key)?, depth + 1, bytes)
            }),
            _ => Ok(()),
        }
    }
    walk(value, 0, &mut 0)
}

/// Examines only the outermost level: the length of a text, or the number of values in another value.
fn top(value: &Value) -> Result<(), Error> {
    let length = match value.as_bytes() {
        Some(bytes) => bytes.len(),
        None => value.len().unwrap_or(0),
    };
    spend(VALUE + length as u64)
}

/// Whether a value is a namespace or holds one, at any depth.
fn holds_namespace(value: &Value) -> Result<bool, Error> {
    if value.as_object().is_some_and(|object| object.type_name().ends_with("::Namespace")) {
        return Ok(true);
    }
    match value.kind() {
        ValueKind::Seq | ValueKind::Iterable => any(value, Ok),
        ValueKind::Map => any(value, |key| value.get_item(&key)),
        _ => Ok(false),
    }
}

fn any(value: &Value, within: impl Fn(Value) -> Result<Value, Error>) -> Result<bool, Error> {
    for item in value.try_iter()? {
        if holds_namespace(&within(item)?)? {
            return Ok(true);
        }
    }
    Ok(false)
}

/// Examines a value that is made into a list. A text becomes a list of its characters.
fn parts(value: &Value) -> Result<(), Error> {
    whole(value)?;
    grow(value.as_str().map_or(0, |text| PART * text.len() as u64))
}

/// Pays for `bytes` that are about to be made; fails if they are too many.
fn grow(bytes: u64) -> Result<(), Error> {
    if bytes > BYTES { Err(too_long()) } else { spend(bytes) }
}

/// Begins a rendering in this thread.
pub(super) fn begin() {
    LEFT.set(WORK);
}

/// Gives an environment the functions that [`Guard`] calls, and filters and methods that stay within limits.
pub(super) fn install(environment: &mut Environment<'static>) {
    environment.set_fuel(Some(FUEL));
    environment.add_function(WHOLE, |value: Value| whole(&value).map(|()| value));
    environment.add_function(TOP, |value: Value| top(&value).map(|()| value));
    environment.add_function(PARTS, |value: Value| parts(&value).map(|()| value));
    environment.add_function(KEPT, |value: Value| {
        whole(&value)?;
        // A namespace that holds itself would never be freed.
        if holds_namespace(&value)? { Err(refuse("it puts a namespace into a namespace")) } else { Ok(value) }
    });
    environment.set_formatter(format);
    for name in ["indent", "batch", "slice", "replace", "join", "format", "split", "lines"] {
        environment.add_filter(name, move |args: Rest<Value>, named: Kwargs| {
            let mut args = args.0;
            if named.args().next().is_some() {
                args.push(named.into());
            }
            args.iter().try_for_each(whole)?;
            check_growth(name, &args)?;
            Environment::new().empty_state().apply_filter(name, &args)
        });
    }
    environment.set_unknown_method_callback(method);
    // It shows a template's variables as the engine sees them.
    environment.remove_global("debug");
}

/// Writes a value out.
fn format(output: &mut Output<'_>, state: &mut State<'_, '_>, value: &Value) -> Result<(), Error> {
    whole(value)?;
    escape_formatter(output, state, value)
}

/// Calls a method that Python's strings, lists and maps have.
fn method(state: &mut State<'_, '_>, value: &Value, name: &str, args: &[Value]) -> Result<Value, Error> {
    let all: Vec<Value> = match name {
        // `join` is called on the separator; the check wants the list first.
        "join" => args.iter().take(1).chain([value]).cloned().collect(),
        _ => [value].into_iter().chain(args).cloned().collect(),
    };
    check_growth(name, &all)?;
    minijinja_contrib::pycompat::unknown_method_callback(state, value, name, args)
}

/// Refuses a call whose result would be far longer than its arguments. The arguments themselves are within limits.
fn check_growth(name: &str, args: &[Value]) -> Result<(), Error> {
    let text = |i: usize| args.get(i).and_then(Value::as_str).unwrap_or_default();
    let grown = match name {
        "indent" | "batch" | "slice" => {
            let named = args.last().and_then(|last| Kwargs::try_from(last.clone()).ok());
            let named = named.iter().flat_map(|kwargs| kwargs.args().filter_map(|name| kwargs.get::<Value>(name).ok()));
            let most = args.iter().cloned().chain(named).filter_map(|value| value.as_i64()).max().unwrap_or(0);
            if most > WIDTH {
                return Err(refuse(format!("it calls {name} with {most}; the most is {WIDTH}")));
            }
            (text(0).matches('\n').count() as u64 + 1) * most.max(0) as u64
        }
        "replace" => text(0).matches(text(1)).count() as u64 * text(2).len() as u64,
        "join" => {
            let count = args.first().and_then(Value::len).unwrap_or(0);
            count as u64 * args.get(1).and_then(Value::as_bytes).map_or(0, <[u8]>::len) as u64
        }
        "format" => {
            // The widths are in the format text.
            let (mut number, mut most, mut places) = (0u64, 0, 0u64);
            for byte in text(0).bytes() {
                number = if byte.is_ascii_digit() { number.saturating_mul(10) + u64::from(byte - b'0') } else { 0 };
                most = number.max(most);
                places += u64::from(byte == b'%' || byte == b'{');
            }
            places.saturating_mul(most)
        }
        "split" => PART * (text(0).matches(text(1)).count() as u64).max(text(0).split_whitespace().count() as u64),
        "splitlines" | "lines" => PART * text(0).lines().count() as u64,
        _ => 0,
    };
    grow(grown)
}

/// Parses, guards and compiles a template, and hands the instructions to `run`.
pub(super) fn compiled<T>(
    environment: &Environment<'_>,
    name: &str,
    source: &str,
    run: impl FnOnce(CodeGenerator<'_>) -> Result<T, Error>,
) -> Result<T, Error> {
    if source.len() > SOURCE {
        return Err(refuse(format!("it has more than {} KiB", SOURCE >> 10)));
    }
    let parsed = parse(source, name, environment.syntax().clone())?;
    let guarded = Guard { nesting: 0 }.stmt(&parsed)?;
    let mut code = CodeGenerator::new(name, source);
    code.compile_stmt(&guarded);
    run(code)
}

/// Rewrites a template, with calls around the values to examine.
struct Guard {
    nesting: usize,
}

/// How a value is examined.
#[derive(Clone, Copy)]
enum Look {
    Not,
    Top,
    Whole,
    Parts,
    Kept,
}

impl Guard {
    fn nested<T>(&mut self, inner: impl FnOnce(&mut Self) -> Result<T, Error>) -> Result<T, Error> {
        if self.nesting == NESTING {
            return Err(refuse(format!("it has an expression of more than {NESTING} parts within each other")));
        }
        self.nesting += 1;
        let result = inner(self);
        self.nesting -= 1;
        result
    }

    fn look<'a>(&mut self, look: Look, expr: &Expr<'a>) -> Result<Expr<'a>, Error> {
        let id = match look {
            Look::Not => return self.expr(expr),
            Look::Top => TOP,
            Look::Whole => WHOLE,
            Look::Parts => PARTS,
            Look::Kept => KEPT,
        };
        let span = expr.span();
        let args = vec![CallArg::Pos(self.expr(expr)?)];
        let expr = Expr::Var(Spanned::new(ast::Var { id }, span));
        Ok(Expr::Call(Spanned::new(ast::Call { expr, args }, span)))
    }

    fn looks<'a>(&mut self, look: Look, exprs: &[Expr<'a>]) -> Result<Vec<Expr<'a>>, Error> {
        exprs.iter().map(|expr| self.look(look, expr)).collect()
    }

    fn maybe<'a>(&mut self, look: Look, expr: Option<&Expr<'a>>) -> Result<Option<Expr<'a>>, Error> {
        expr.map(|expr| self.look(look, expr)).transpose()
    }

    fn args<'a>(&mut self, look: Look, args: &[CallArg<'a>]) -> Result<Vec<CallArg<'a>>, Error> {
        let arg = |arg: &CallArg<'a>| {
            Ok(match arg {
                CallArg::Pos(expr) => CallArg::Pos(self.look(look, expr)?),
                CallArg::Kwarg(name, expr) => CallArg::Kwarg(name, self.look(look, expr)?),
                CallArg::PosSplat(expr) => CallArg::PosSplat(self.look(look, expr)?),
                CallArg::KwargSplat(expr) => CallArg::KwargSplat(self.look(look, expr)?),
            })
        };
        args.iter().map(arg).collect()
    }

    fn expr<'a>(&mut self, expr: &Expr<'a>) -> Result<Expr<'a>, Error> {
        self.nested(|guard| guard.expr_inner(expr))
    }

    fn expr_inner<'a>(&mut self, expr: &Expr<'a>) -> Result<Expr<'a>, Error> {
        let span = expr.span();
        macro_rules! node {
            ($kind:ident { $($fields:tt)* }) => { Expr::$kind(Spanned::new(ast::$kind { $($fields)* }, span)) };
        }
        Ok(match expr {
            Expr::Var(e) => node!(Var { id: e.id }),
            Expr::Const(e) => node!(Const { value: e.value.clone() }),
            Expr::Slice(e) => node!(Slice {
                expr: self.look(Look::Top, &e.expr)?,
                start: self.maybe(Look::Not, e.start.as_ref())?,
                stop: self.maybe(Look::Not, e.stop.as_ref())?,
                step: self.maybe(Look::Not, e.step.as_ref())?,
            }),
            Expr::UnaryOp(e) => {
                // The kind can be neither copied nor cloned.
                #[allow(clippy::needless_match)]
                let op = match e.op {
                    ast::UnaryOpKind::Not => ast::UnaryOpKind::Not,
                    ast::UnaryOpKind::Neg => ast::UnaryOpKind::Neg,
                };
                node!(UnaryOp { op, expr: self.expr(&e.expr)? })
            }
            Expr::BinOp(e) => {
                use ast::BinOpKind::{Mul, Pow, ScAnd, ScOr};
                let look = |operand: &Expr<'_>| match (e.op, operand) {
                    (ScAnd | ScOr, _) => Look::Not,
                    // The compiler computes constant expressions, where no limit holds. `*` and `**` could make large
                    // values there: the calls around their operands keep them from being computed before the template
                    // runs.
                    (op, Expr::Const(_)) if !matches!(op, Mul | Pow) => Look::Not,
                    _ => Look::Whole,
                };
                let (left, right) = (look(&e.left), look(&e.right));
                node!(BinOp { op: e.op, left: self.look(left, &e.left)?, right: self.look(right, &e.right)? })
            }
            Expr::Compare(e) => {
                let op = |op: &ast::CompareOp<'a>| -> Result<_, Error> {
                    Ok(ast::CompareOp { op: op.op, expr: self.look(Look::Whole, &op.expr)? })
                };
                let ops = e.ops.iter().map(op).collect::<Result<_, _>>()?;
                node!(Compare { expr: self.look(Look::Whole, &e.expr)?, ops })
            }
            Expr::IfExpr(e) => node!(IfExpr {
                test_expr: self.expr(&e.test_expr)?,
                true_expr: self.expr(&e.true_expr)?,
                false_expr: self.maybe(Look::Not, e.false_expr.as_ref())?,
            }),
            Expr::Filter(e) => node!(Filter {
                name: e.name,
                expr: self.maybe(filter_look(e.name), e.expr.as_ref())?,
                args: self.args(Look::Whole, &e.args)?,
            }),
            Expr::Test(e) => node!(Test {
                name: e.name,
                expr: self.look(if LAZY_TESTS.contains(&e.name) { Look::Not } else { Look::Whole }, &e.expr)?,
                args: self.args(Look::Whole, &e.args)?,
            }),
            Expr::GetAttr(e) => node!(GetAttr { expr: self.expr(&e.expr)?, name: e.name }),
            Expr::GetItem(e) => node!(GetItem {
                expr: self.look(Look::Top, &e.expr)?,
                subscript_expr: self.look(Look::Whole, &e.subscript_expr)?,
            }),
            Expr::Call(e) => Expr::Call(self.call(e)?),
            Expr::List(e) => node!(List { items: self.looks(Look::Not, &e.items)? }),
            Expr::Tuple(e) => node!(Tuple { items: self.looks(Look::Not, &e.items)? }),
            Expr::Map(e) => {
                node!(Map { keys: self.looks(Look::Whole, &e.keys)?, values: self.looks(Look::Not, &e.values)? })
            }
        })
    }

    fn call<'a>(&mut self, call: &Spanned<ast::Call<'a>>) -> Result<Spanned<ast::Call<'a>>, Error> {
        let expr = match &call.expr {
            Expr::GetAttr(method) => {
                // `loop` and `self` are the engine's, not values of the template.
                let own = matches!(&method.expr, Expr::Var(var) if ["loop", "self"].contains(&var.id));
                let look = if own { Look::Not } else { Look::Whole };
                let attr = ast::GetAttr { expr: self.look(look, &method.expr)?, name: method.name };
                Expr::GetAttr(Spanned::new(attr, method.span()))
            }
            other => self.expr(other)?,
        };
        let args = self.args(Look::Whole, &call.args)?;
        Ok(Spanned::new(ast::Call { expr, args }, call.span()))
    }

    fn stmts<'a>(&mut self, stmts: &[Stmt<'a>]) -> Result<Vec<Stmt<'a>>, Error> {
        stmts.iter().map(|stmt| self.stmt(stmt)).collect()
    }

    fn stmt<'a>(&mut self, stmt: &Stmt<'a>) -> Result<Stmt<'a>, Error> {
        self.nested(|guard| guard.stmt_inner(stmt))
    }

    fn stmt_inner<'a>(&mut self, stmt: &Stmt<'a>) -> Result<Stmt<'a>, Error> {
        macro_rules! node {
            ($kind:ident, $of:ident, { $($fields:tt)* }) => {
                Stmt::$kind(Spanned::new(ast::$kind { $($fields)* }, $of.span()))
            };
        }
        Ok(match stmt {
            Stmt::Template(s) => node!(Template, s, { children: self.stmts(&s.children)? }),
            Stmt::EmitExpr(s) => node!(EmitExpr, s, { expr: self.expr(&s.expr)? }),
            // As an expression, raw text goes through `format`, which counts it.
            Stmt::EmitRaw(s) => {
                let expr =
                    Expr::Const(Spanned::new(ast::Const { value: Value::from_safe_string(s.raw.into()) }, s.span()));
                node!(EmitExpr, s, { expr })
            }
            Stmt::ForLoop(s) => node!(ForLoop, s, {
                target: self.expr(&s.target)?,
                iter: self.look(Look::Top, &s.iter)?,
                filter_expr: self.maybe(Look::Not, s.filter_expr.as_ref())?,
                recursive: s.recursive,
                body: self.stmts(&s.body)?,
                else_body: self.stmts(&s.else_body)?,
            }),
            Stmt::IfCond(s) => node!(IfCond, s, {
                expr: self.expr(&s.expr)?,
                true_body: self.stmts(&s.true_body)?,
                false_body: self.stmts(&s.false_body)?,
            }),
            Stmt::WithBlock(s) => {
                let pair = |(target, value): &(Expr<'a>, Expr<'a>)| Ok((self.expr(target)?, self.expr(value)?));
                let assignments = s.assignments.iter().map(pair).collect::<Result<_, Error>>()?;
                node!(WithBlock, s, { assignments, body: self.stmts(&s.body)? })
            }
            Stmt::Set(s) => {
                let look = if matches!(s.target, Expr::GetAttr(_)) { Look::Kept } else { Look::Not };
                node!(Set, s, { target: self.expr(&s.target)?, expr: self.look(look, &s.expr)? })
            }
            Stmt::SetBlock(s) => node!(SetBlock, s, {
                target: self.expr(&s.target)?,
                filter: self.maybe(Look::Not, s.filter.as_ref())?,
                body: self.stmts(&s.body)?,
            }),
            Stmt::AutoEscape(s) => {
                node!(AutoEscape, s, { enabled: self.expr(&s.enabled)?, body: self.stmts(&s.body)? })
            }
            Stmt::FilterBlock(s) => {
                node!(FilterBlock, s, { filter: self.expr(&s.filter)?, body: self.stmts(&s.body)? })
            }
            Stmt::Macro(s) => Stmt::Macro(self.macro_(s)?),
            Stmt::CallBlock(s) => {
                node!(CallBlock, s, { call: self.call(&s.call)?, macro_decl: self.macro_(&s.macro_decl)? })
            }
            Stmt::Continue(s) => Stmt::Continue(Spanned::new(ast::Continue, s.span())),
            Stmt::Break(s) => Stmt::Break(Spanned::new(ast::Break, s.span())),
            Stmt::Do(s) => node!(Do, s, { call: self.call(&s.call)? }),
            Stmt::Block(_) | Stmt::Import(_) | Stmt::FromImport(_) | Stmt::Extends(_) | Stmt::Include(_) => {
                return Err(refuse("it is made of several templates (block, import, extends or include)"));
            }
        })
    }

    fn macro_<'a>(&mut self, s: &Spanned<ast::Macro<'a>>) -> Result<Spanned<ast::Macro<'a>>, Error> {
        let args = self.looks(Look::Not, &s.args)?;
        let defaults = self.looks(Look::Not, &s.defaults)?;
        Ok(Spanned::new(ast::Macro { name: s.name, args, defaults, body: self.stmts(&s.body)? }, s.span()))
    }
}

/// Filters whose work does not grow with the value.
const LAZY_FILTERS: &[&str] = &["length", "count", "first", "last", "default", "d", "items"];
/// Filters that take a text as it is, without making a list of it.
const TEXT_FILTERS: &[&str] = &[
    "abs",
    "attr",
    "bool",
    "capitalize",
    "e",
    "escape",
    "float",
    "format",
    "indent",
    "int",
    "lower",
    "pprint",
    "replace",
    "round",
    "safe",
    "split",
    "lines",
    "string",
    "title",
    "tojson",
    "trim",
    "upper",
];
/// Tests whose work does not grow with the value.
const LAZY_TESTS: &[&str] = &[
    "boolean",
    "defined",
    "false",
    "float",
    "integer",
    "iterable",
    "mapping",
    "none",
    "number",
    "sequence",
    "string",
    "true",
    "undefined",
];

fn filter_look(name: &str) -> Look {
    match name {
        lazy if LAZY_FILTERS.contains(&lazy) => Look::Not,
        text if TEXT_FILTERS.contains(&text) => Look::Whole,
        _ => Look::Parts,
    }
}
