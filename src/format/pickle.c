/* SPDX-License-Identifier: MIT */
/*
 * Looking through a pickle; see pickle.h. First its program runs, over nodes: a node is a value, a
 * cell is a place in a container that holds one. What cannot lead to a tensor - numbers and texts
 * in lists and dicts - gets no cell. Then the result is walked for tensors, and the way to each
 * becomes its name.
 *
 * Invariants
 *   1. Nodes and cells are numbers into arrays and only ever added: what a memo or a stack holds
 *      stays right whatever grows.
 *   2. Every step of the program takes a byte at least, and adds a fixed number of nodes and cells.
 */
#include <errno.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "format/pickle.h"
#include "format/words.h"
#include "sys/os.h"

#define DAMAGED "The file is damaged or was not written by torch.save: save it again"
#define NODES_MAX (16u << 20)
#define STEPS_MAX (16u << 20)	/* of the walk: what is shared is walked each time */
#define TENSORS_MAX (1u << 20)
#define TEXTS_MAX (256u << 20)	/* bytes of all names */
#define DEPTH_MAX 1000u		/* that of Python's own pickler */
#define RANK_MAX 64u		/* that of torch */
#define NONE UINT32_MAX

static const struct torch_dtype dtypes[] = {
	{ "float32", "FloatStorage", 32, PEN_F32 },
	{ "bfloat16", "BFloat16Storage", 16, PEN_BF16 },
	{ "float16", "HalfStorage", 16, PEN_F16 },
	{ "float64", "DoubleStorage", 64, PEN_F64 },
	{ "int64", "LongStorage", 64, PEN_I64 },
	{ "int32", "IntStorage", 32, PEN_I32 },
	{ "int16", "ShortStorage", 16, PEN_I16 },
	{ "int8", "CharStorage", 8, PEN_I8 },
	{ "uint8", "ByteStorage", 8, PEN_U8 },
	{ "bool", "BoolStorage", 8, PEN_BOOL },
	{ "complex64", "ComplexFloatStorage", 64, PEN_C64 },
	{ "complex128", "ComplexDoubleStorage", 128, -1 },
	{ "qint8", "QInt8Storage", 8, -1 },
	{ "quint8", "QUInt8Storage", 8, -1 },
	{ "qint32", "QInt32Storage", 32, -1 },
	{ "quint4x2", "QUInt4x2Storage", 4, -1 },
	{ "quint2x4", "QUInt2x4Storage", 2, -1 },
	{ "uint16", NULL, 16, PEN_U16 },
	{ "uint32", NULL, 32, PEN_U32 },
	{ "uint64", NULL, 64, PEN_U64 },
	{ "float8_e4m3fn", NULL, 8, PEN_F8_E4M3 },
	{ "float8_e5m2", NULL, 8, PEN_F8_E5M2 },
	{ "float8_e4m3fnuz", NULL, 8, PEN_F8_E4M3FNUZ },
	{ "float8_e5m2fnuz", NULL, 8, PEN_F8_E5M2FNUZ },
	{ "float8_e8m0fnu", NULL, 8, PEN_F8_E8M0 },
	{ "float4_e2m1fn_x2", NULL, 8, -1 },
	{ "complex32", NULL, 32, -1 },
	{ "bits8", NULL, 8, -1 },
	{ "bits16", NULL, 16, -1 },
	{ "bits1x8", NULL, 8, -1 },
	{ "bits2x4", NULL, 8, -1 },
	{ "bits4x2", NULL, 8, -1 },
};

enum kind {
	OTHER,		/* nothing that matters here: None, floats, bytes ... */
	NUMBER,
	TEXT,
	GLOBAL,		/* cells: module, name */
	TUPLE,
	LIST,		/* also what is one by its methods: sets */
	DICT,
	STORAGE,	/* cells: what the pickler called it by, a tuple */
	TENSOR,		/* cells: the tuple that its function is called with */
	THING,		/* cells: arguments, state */
};

struct node {
	uint32_t kind;
	uint32_t count;		/* of items that were added, with or without a cell */
	union {
		int64_t number;
		struct {
			uint32_t at, length;	/* in the pickle */
		} text;
		struct {
			uint32_t first, last;	/* cells, or NONE */
		} cells;
	};
};

struct cell {
	uint32_t node, next;
	uint32_t key;		/* a node, for DICT; NAMELESS or NUMBERED: by `index` */
	uint32_t index;
};

#define NAMELESS (NONE - 1)
#define NUMBERED (NONE - 2)

struct array {
	void *items;
	size_t count, room;
};

struct machine {
	const char *name;
	const unsigned char *bytes;
	size_t length, at;
	uint64_t start;
	struct array nodes, cells, stack, marks, memo;
	struct pen_error *err;
	int rc;			/* the first error; steps after it change nothing that matters */

	/* the walk */
	struct pickle *pickle;
	struct array tensors, numbers, texts, path;
	unsigned char *on_the_way;	/* for each node: is the walk inside of it? */
	size_t steps;
};

static int bad(struct machine *machine, const char *what)
{
	if (machine->rc)
		return machine->rc;
	machine->rc = words_bad(machine->err, machine->name,
				(int64_t)(machine->start + machine->at), "its pickle %s", what);
	error_hint(machine->err, "%s", DAMAGED);
	return machine->rc;
}

static int too_much(struct machine *machine, const char *what)
{
	if (machine->rc)
		return machine->rc;
	machine->rc = words_bad(machine->err, machine->name,
				(int64_t)(machine->start + machine->at), "its pickle %s", what);
	error_hint(machine->err, "It was made to take all memory, or is no checkpoint");
	return machine->rc;
}

/* Room for `more` items; false, with the error kept, where there is none. */
static bool grow(struct machine *machine, struct array *array, size_t item, size_t more)
{
	size_t wanted = array->room ? array->room : 64;
	void *grown;

	if (more <= array->room - array->count)
		return true;
	while (wanted - array->count < more)
		wanted *= 2;
	grown = os_realloc(array->items, wanted, item);
	if (!grown) {
		if (!machine->rc)
			machine->rc = error_sys(machine->err, -ENOMEM, "open", machine->name, -1);
		return false;
	}
	array->items = grown;
	array->room = wanted;
	return true;
}

/* ------------------------------------------------------------------------- nodes and cells -- */

static struct node *node(const struct machine *machine, uint32_t index)
{
	return (struct node *)machine->nodes.items + index;
}

static struct cell *cell(const struct machine *machine, uint32_t index)
{
	return (struct cell *)machine->cells.items + index;
}

static bool has_cells(enum kind kind)
{
	return kind >= GLOBAL;
}

/* Node 0 is what stands for everything that does not matter, and for what failed. */
static uint32_t add_node(struct machine *machine, enum kind kind)
{
	struct node new = { .kind = kind };

	if (machine->nodes.count >= NODES_MAX) {
		too_much(machine, "has more parts than can be looked at");
		return 0;
	}
	if (!grow(machine, &machine->nodes, sizeof(new), 1))
		return 0;
	if (has_cells(kind))
		new.cells.first = new.cells.last = NONE;
	*node(machine, (uint32_t)machine->nodes.count) = new;
	return (uint32_t)machine->nodes.count++;
}

static void add_cell(struct machine *machine, uint32_t to, uint32_t value, uint32_t key)
{
	uint32_t index = (uint32_t)machine->cells.count, place = node(machine, to)->count;
	struct node *container;

	if (machine->cells.count >= NODES_MAX) {
		too_much(machine, "has more parts than can be looked at");
		return;
	}
	if (machine->rc || !grow(machine, &machine->cells, sizeof(struct cell), 1))
		return;
	machine->cells.count++;
	*cell(machine, index) = (struct cell){ value, NONE, key, place };
	container = node(machine, to);
	if (container->cells.last == NONE)
		container->cells.first = index;
	else
		cell(machine, container->cells.last)->next = index;
	container->cells.last = index;
}

/* Put an item into a container. Only tuples keep what cannot lead to a tensor: calls take it. */
static void add_item(struct machine *machine, uint32_t to, uint32_t value, uint32_t key)
{
	if (!has_cells(node(machine, to)->kind)) {
		bad(machine, "puts an item into what has none");
		return;
	}
	if (node(machine, to)->kind == TUPLE || has_cells(node(machine, value)->kind))
		add_cell(machine, to, value, key);
	node(machine, to)->count++;
}

/* The items of a container; NONE past the last. */
static uint32_t first_cell(const struct machine *machine, uint32_t of)
{
	const struct node *container = node(machine, of);

	return has_cells(container->kind) ? container->cells.first : NONE;
}

/* Item `place` of a tuple, or of what is made like one; node 0 where there is none. */
static uint32_t item(const struct machine *machine, uint32_t of, uint32_t place)
{
	uint32_t at = first_cell(machine, of);

	while (at != NONE && place--)
		at = cell(machine, at)->next;
	return at == NONE ? 0 : cell(machine, at)->node;
}

static bool is_text(const struct machine *machine, uint32_t index, const char *text)
{
	const struct node *is = node(machine, index);

	return is->kind == TEXT && is->text.length == strlen(text) &&
	       !memcmp(machine->bytes + is->text.at, text, is->text.length);
}

static bool is_global(const struct machine *machine, uint32_t index, const char *module,
		      const char *name)
{
	return node(machine, index)->kind == GLOBAL &&
	       is_text(machine, item(machine, index, 0), module) &&
	       is_text(machine, item(machine, index, 1), name);
}

/* ------------------------------------------------------------------------------- the stack -- */

static void push(struct machine *machine, uint32_t index)
{
	if (grow(machine, &machine->stack, sizeof(uint32_t), 1))
		((uint32_t *)machine->stack.items)[machine->stack.count++] = index;
}

static size_t last_mark(const struct machine *machine)
{
	size_t count = machine->marks.count;

	return count ? ((size_t *)machine->marks.items)[count - 1] : 0;
}

static uint32_t top(struct machine *machine)
{
	if (machine->stack.count <= last_mark(machine)) {
		bad(machine, "takes more from its stack than there is");
		return 0;
	}
	return ((uint32_t *)machine->stack.items)[machine->stack.count - 1];
}

static uint32_t pop(struct machine *machine)
{
	uint32_t index = top(machine);

	if (!machine->rc)
		machine->stack.count--;
	return index;
}

static void push_mark(struct machine *machine)
{
	if (grow(machine, &machine->marks, sizeof(size_t), 1))
		((size_t *)machine->marks.items)[machine->marks.count++] = machine->stack.count;
}

/* What is above the last mark, which goes with it: where in the stack, and how much. */
static const uint32_t *pop_mark(struct machine *machine, size_t *count)
{
	size_t mark = last_mark(machine);

	*count = 0;
	if (!machine->marks.count) {
		bad(machine, "goes back to a mark that is not there");
		return NULL;
	}
	machine->marks.count--;
	*count = machine->stack.count - mark;
	machine->stack.count = mark;
	/* Adding nodes and cells does not touch the stack. */
	return *count ? (uint32_t *)machine->stack.items + mark : NULL;
}

static void put_memo(struct machine *machine, uint64_t place, uint32_t index)
{
	struct array *memo = &machine->memo;

	/* Picklers number what they remember, so there is no more of it than bytes. */
	if (place > machine->length) {
		bad(machine, "remembers more than it has");
		return;
	}
	if (place >= memo->count) {
		if (!grow(machine, memo, sizeof(uint32_t), (size_t)place + 1 - memo->count))
			return;
		while (memo->count <= place)
			((uint32_t *)memo->items)[memo->count++] = NONE;
	}
	((uint32_t *)memo->items)[place] = index;
}

static void push_memo(struct machine *machine, uint64_t place)
{
	uint32_t index = place < machine->memo.count
				 ? ((uint32_t *)machine->memo.items)[place] : NONE;

	if (index == NONE)
		bad(machine, "recalls what it did not remember");
	else
		push(machine, index);
}

/* --------------------------------------------------------------------------- bytes of code -- */

static uint64_t take_number(struct machine *machine, unsigned int size)
{
	uint64_t value = 0;

	if (size > machine->length - machine->at) {
		bad(machine, "ends too soon");
		return 0;
	}
	for (unsigned int i = size; i > 0; i--)
		value = value << 8 | machine->bytes[machine->at + i - 1];
	machine->at += size;
	return value;
}

/* Go past `length` bytes; gives where they are. */
static uint32_t take_bytes(struct machine *machine, uint64_t length)
{
	size_t at = machine->at;

	if (length > machine->length - machine->at) {
		bad(machine, "ends too soon");
		return 0;
	}
	machine->at += (size_t)length;
	return (uint32_t)at;
}

static uint32_t add_text(struct machine *machine, uint32_t at, uint64_t length)
{
	uint32_t index = machine->rc ? 0 : add_node(machine, TEXT);

	if (index) {
		node(machine, index)->text.at = at;
		node(machine, index)->text.length = (uint32_t)length;
	}
	return index;
}

static uint32_t take_text(struct machine *machine, unsigned int size)
{
	uint64_t length = take_number(machine, size);

	return add_text(machine, take_bytes(machine, length), length);
}

static uint32_t take_line(struct machine *machine)
{
	const unsigned char *from = machine->bytes + machine->at;
	const unsigned char *end = memchr(from, '\n', machine->length - machine->at);
	uint32_t at = (uint32_t)machine->at;

	if (!end) {
		bad(machine, "ends too soon");
		return 0;
	}
	machine->at += (size_t)(end - from) + 1;
	return add_text(machine, at, (uint64_t)(end - from));
}

static uint32_t add_whole(struct machine *machine, int64_t number)
{
	uint32_t index = machine->rc ? 0 : add_node(machine, NUMBER);

	if (index)
		node(machine, index)->number = number;
	return index;
}

/* A number in decimal, as the oldest protocol has them; also "01" for true and "7L". */
static uint32_t take_decimal(struct machine *machine)
{
	uint32_t line = take_line(machine);
	const struct node *text = node(machine, line);
	char digits[24], *end;
	long long number;

	if (machine->rc || text->text.length >= sizeof(digits))
		return 0;
	memcpy(digits, machine->bytes + text->text.at, text->text.length);
	digits[text->text.length] = 0;
	errno = 0;
	number = strtoll(digits, &end, 10);
	if (end == digits || errno || (*end && strcmp(end, "L")))
		return 0;
	return add_whole(machine, number);
}

/* Little endian, two's complement; what has more than 64 bits is no size of anything. */
static uint32_t take_long(struct machine *machine, uint64_t length)
{
	uint32_t at = take_bytes(machine, length);
	uint64_t value = 0;

	if (machine->rc || length > 8)
		return 0;
	for (uint64_t i = 0; i < length; i++)
		value |= (uint64_t)machine->bytes[at + i] << (8 * i);
	if (length && length < 8 && machine->bytes[at + length - 1] & 0x80)
		value |= ~0ull << (8 * length);
	return add_whole(machine, (int64_t)value);
}

/* ---------------------------------------------------------------------------------- calls -- */

static uint32_t add_pair(struct machine *machine, enum kind kind, uint32_t first, uint32_t second)
{
	uint32_t index = add_node(machine, kind);

	if (!index)
		return 0;
	add_cell(machine, index, first, NAMELESS);
	add_cell(machine, index, second, NAMELESS);
	return index;
}

static bool makes_a_tensor(const struct machine *machine, uint32_t function)
{
	static const char *const names[] = {
		"_rebuild_tensor_v2", "_rebuild_tensor_v3", "_rebuild_tensor", "_rebuild_qtensor",
	};

	for (size_t i = 0; i < sizeof(names) / sizeof(names[0]); i++)
		if (is_global(machine, function, "torch._utils", names[i]))
			return true;
	return false;
}

/* What a function would give for a tuple of arguments. */
static uint32_t call(struct machine *machine, uint32_t function, uint32_t arguments)
{
	uint32_t index, inner;

	if (node(machine, arguments)->kind != TUPLE) {
		bad(machine, "calls something without arguments");
		return 0;
	}
	if (makes_a_tensor(machine, function)) {
		index = add_node(machine, TENSOR);
		if (index)
			add_cell(machine, index, arguments, NAMELESS);
		/* For messages: an item is not counted in what has none. */
		if (index)
			node(machine, index)->count = (uint32_t)machine->at;
		return index;
	}
	if (is_global(machine, function, "collections", "OrderedDict") &&
	    !node(machine, arguments)->count)
		return add_node(machine, DICT);
	/* A parameter is the tensor that it is made of. */
	inner = item(machine, arguments, 0);
	if ((is_global(machine, function, "torch._utils", "_rebuild_parameter") ||
	     is_global(machine, function, "torch._utils", "_rebuild_parameter_with_state")) &&
	    node(machine, inner)->kind == TENSOR)
		return inner;
	/* A tensor of a class of its own, or with attributes: function, class, arguments, state. */
	if (is_global(machine, function, "torch._tensor", "_rebuild_from_type_v2") &&
	    makes_a_tensor(machine, inner))
		return add_pair(machine, THING,
				call(machine, inner, item(machine, arguments, 2)),
				item(machine, arguments, 3));
	index = add_node(machine, THING);
	if (index)
		add_cell(machine, index, arguments, NAMELESS);
	return index;
}

/* Items above the mark become a tuple, a list or the arguments of something. */
static uint32_t gather(struct machine *machine, enum kind kind, const uint32_t *items,
		       size_t count)
{
	uint32_t index = machine->rc ? 0 : add_node(machine, kind);

	for (size_t i = 0; index && i < count; i++)
		add_item(machine, index, items[i], NUMBERED);
	return index;
}

static void set_items(struct machine *machine, uint32_t to, const uint32_t *items, size_t count)
{
	if (count % 2)
		bad(machine, "has a key without a value");
	for (size_t i = 0; !machine->rc && i + 1 < count; i += 2)
		add_item(machine, to, items[i + 1], items[i]);
}

static void push_tuple(struct machine *machine, unsigned int count)
{
	uint32_t items[3] = { 0 };

	for (unsigned int i = count; i > 0; i--)
		items[i - 1] = pop(machine);
	push(machine, gather(machine, TUPLE, items, count));
}

static void push_marked(struct machine *machine, enum kind kind)
{
	size_t count;
	const uint32_t *items = pop_mark(machine, &count);

	push(machine, gather(machine, kind, items, count));
}

static void push_global(struct machine *machine, uint32_t module, uint32_t name)
{
	push(machine, machine->rc ? 0 : add_pair(machine, GLOBAL, module, name));
}

/* A class and what it is made with: calls of the kinds that unpicklers have. */
static void push_thing(struct machine *machine, uint32_t arguments)
{
	uint32_t index = machine->rc ? 0 : add_node(machine, THING);

	if (index)
		add_cell(machine, index, arguments, NAMELESS);
	push(machine, index);
}

/* ----------------------------------------------------------------------------- the machine -- */

static void step_items(struct machine *machine, unsigned char code)
{
	uint32_t value, key;
	size_t count;
	const uint32_t *items;

	switch (code) {
	case 'a':	/* APPEND */
		value = pop(machine);
		add_item(machine, top(machine), value, NUMBERED);
		break;
	case 'e':	/* APPENDS */
	case 0x90:	/* ADDITEMS */
		items = pop_mark(machine, &count);
		key = top(machine);
		for (size_t i = 0; !machine->rc && i < count; i++)
			add_item(machine, key, items[i], NUMBERED);
		break;
	case 's':	/* SETITEM */
		value = pop(machine);
		key = pop(machine);
		add_item(machine, top(machine), value, key);
		break;
	case 'u':	/* SETITEMS */
		items = pop_mark(machine, &count);
		set_items(machine, top(machine), items, count);
		break;
	case 'd':	/* DICT */
		items = pop_mark(machine, &count);
		value = machine->rc ? 0 : add_node(machine, DICT);
		if (value)
			set_items(machine, value, items, count);
		push(machine, value);
		break;
	default:	/* BUILD */
		value = pop(machine);
		key = top(machine);
		/* A tensor's state is no tensor of the checkpoint; node 0 has no parts. */
		if (has_cells(node(machine, value)->kind) && has_cells(node(machine, key)->kind) &&
		    node(machine, key)->kind != TENSOR && node(machine, key)->kind != TUPLE)
			add_cell(machine, key, value, NAMELESS);
	}
}

static void step_call(struct machine *machine, unsigned char code)
{
	uint32_t value, arguments, index;
	size_t count;
	const uint32_t *items;

	switch (code) {
	case 'R':	/* REDUCE */
		arguments = pop(machine);
		value = pop(machine);
		push(machine, machine->rc ? 0 : call(machine, value, arguments));
		break;
	case 0x81:	/* NEWOBJ */
		arguments = pop(machine);
		pop(machine);
		push_thing(machine, arguments);
		break;
	case 0x92:	/* NEWOBJ_EX */
		value = pop(machine);
		arguments = pop(machine);
		pop(machine);
		push(machine, machine->rc ? 0 : add_pair(machine, THING, arguments, value));
		break;
	case 'o':	/* OBJ */
		items = pop_mark(machine, &count);
		push_thing(machine, gather(machine, TUPLE, items, count));
		break;
	case 'i':	/* INST */
		take_line(machine);
		take_line(machine);
		items = pop_mark(machine, &count);
		push_thing(machine, gather(machine, TUPLE, items, count));
		break;
	default:	/* BINPERSID */
		value = pop(machine);
		index = machine->rc ? 0 : add_node(machine, STORAGE);
		if (index)
			add_cell(machine, index, value, NAMELESS);
		push(machine, index);
	}
}

static void step_text(struct machine *machine, unsigned char code)
{
	switch (code) {
	case 'X':	/* BINUNICODE */
	case 'T':	/* BINSTRING */
		push(machine, take_text(machine, 4));
		break;
	case 0x8c:	/* SHORT_BINUNICODE */
	case 'U':	/* SHORT_BINSTRING */
		push(machine, take_text(machine, 1));
		break;
	case 0x8d:	/* BINUNICODE8 */
		push(machine, take_text(machine, 8));
		break;
	case 'V':	/* UNICODE */
	case 'S':	/* STRING */
		push(machine, take_line(machine));
		break;
	case 'B':	/* BINBYTES */
		take_bytes(machine, take_number(machine, 4));
		push(machine, 0);
		break;
	case 'C':	/* SHORT_BINBYTES */
		take_bytes(machine, take_number(machine, 1));
		push(machine, 0);
		break;
	default:	/* BINBYTES8, BYTEARRAY8 */
		take_bytes(machine, take_number(machine, 8));
		push(machine, 0);
	}
}

static void step_number(struct machine *machine, unsigned char code)
{
	switch (code) {
	case 'J':	/* BININT */
		push(machine, add_whole(machine, (int32_t)take_number(machine, 4)));
		break;
	case 'K':	/* BININT1 */
		push(machine, add_whole(machine, (int64_t)take_number(machine, 1)));
		break;
	case 'M':	/* BININT2 */
		push(machine, add_whole(machine, (int64_t)take_number(machine, 2)));
		break;
	case 0x8a:	/* LONG1 */
		push(machine, take_long(machine, take_number(machine, 1)));
		break;
	case 0x8b:	/* LONG4 */
		push(machine, take_long(machine, take_number(machine, 4)));
		break;
	case 'G':	/* BINFLOAT */
		take_number(machine, 8);
		push(machine, 0);
		break;
	case 'F':	/* FLOAT */
		take_line(machine);
		push(machine, 0);
		break;
	default:	/* INT, LONG */
		push(machine, take_decimal(machine));
	}
}

static void step_memo(struct machine *machine, unsigned char code)
{
	const struct node *line;
	uint64_t place;

	switch (code) {
	case 'q':	/* BINPUT */
	case 'h':	/* BINGET */
		place = take_number(machine, 1);
		break;
	case 'r':	/* LONG_BINPUT */
	case 'j':	/* LONG_BINGET */
		place = take_number(machine, 4);
		break;
	case 0x94:	/* MEMOIZE */
		place = machine->memo.count;
		break;
	default:	/* PUT, GET */
		line = node(machine, take_decimal(machine));
		place = line->kind == NUMBER && line->number >= 0 ? (uint64_t)line->number
								  : UINT64_MAX;
	}
	if (machine->rc)
		return;
	if (code == 'h' || code == 'j' || code == 'g')
		push_memo(machine, place);
	else
		put_memo(machine, place, top(machine));
}

static void step_stack(struct machine *machine, unsigned char code)
{
	uint32_t name;
	size_t count;

	switch (code) {
	case '(':	/* MARK */
		push_mark(machine);
		break;
	case '0':	/* POP, of a mark where that is what is on top */
		if (machine->marks.count && last_mark(machine) == machine->stack.count)
			machine->marks.count--;
		else
			pop(machine);
		break;
	case '1':	/* POP_MARK */
		pop_mark(machine, &count);
		break;
	case '2':	/* DUP */
		push(machine, top(machine));
		break;
	case 'c':	/* GLOBAL */
		name = take_line(machine);
		push_global(machine, name, machine->rc ? 0 : take_line(machine));
		break;
	case 0x93:	/* STACK_GLOBAL */
		name = pop(machine);
		push_global(machine, pop(machine), name);
		break;
	case 'P':	/* PERSID: none of torch's */
		take_line(machine);
		push(machine, 0);
		break;
	case 0x80:	/* PROTO */
		if (take_number(machine, 1) > 5)
			bad(machine, "is of a protocol that is not known");
		break;
	case 0x95:	/* FRAME: how much may be read at once */
		take_number(machine, 8);
		break;
	default:	/* EXT1, EXT2, EXT4: things that were numbered elsewhere */
		take_number(machine, 1u << (code - 0x82));
		push(machine, 0);
	}
}

/* One instruction; false after the last. */
static bool step(struct machine *machine)
{
	unsigned char code = (unsigned char)take_number(machine, 1);

	if (machine->rc)
		return false;
	switch (code) {
	case '.':	/* STOP */
		return false;
	case '(': case '0': case '1': case '2': case 'c': case 0x93: case 'P': case 0x80:
	case 0x95: case 0x82: case 0x83: case 0x84:
		step_stack(machine, code);
		break;
	case 'q': case 'h': case 'r': case 'j': case 'p': case 'g': case 0x94:
		step_memo(machine, code);
		break;
	case 'J': case 'K': case 'M': case 0x8a: case 0x8b: case 'G': case 'F': case 'I': case 'L':
		step_number(machine, code);
		break;
	case 'X': case 'T': case 0x8c: case 'U': case 0x8d: case 'V': case 'S': case 'B': case 'C':
	case 0x8e: case 0x96:
		step_text(machine, code);
		break;
	case 'R': case 0x81: case 0x92: case 'o': case 'i': case 'Q':
		step_call(machine, code);
		break;
	case 'a': case 'e': case 0x90: case 's': case 'u': case 'd': case 'b':
		step_items(machine, code);
		break;
	case 'N': case 0x88: case 0x89:	/* NONE, NEWTRUE, NEWFALSE */
		push(machine, 0);
		break;
	case '}':	/* EMPTY_DICT */
		push(machine, add_node(machine, DICT));
		break;
	case ']': case 0x8f:	/* EMPTY_LIST, EMPTY_SET */
		push(machine, add_node(machine, LIST));
		break;
	case 'l': case 0x91:	/* LIST, FROZENSET */
		push_marked(machine, LIST);
		break;
	case ')':	/* EMPTY_TUPLE */
		push(machine, add_node(machine, TUPLE));
		break;
	case 't':	/* TUPLE */
		push_marked(machine, TUPLE);
		break;
	case 0x85: case 0x86: case 0x87:	/* TUPLE1, TUPLE2, TUPLE3 */
		push_tuple(machine, code - 0x84u);
		break;
	default:	/* buffers that lie elsewhere, too: torch has none */
		machine->at--;
		bad(machine, "has an instruction that is none");
	}
	return !machine->rc;
}

/* --------------------------------------------------------------------------------- tensors -- */

static const struct torch_dtype *find_dtype(const struct machine *machine, uint32_t global,
					    bool storage)
{
	const char *module = "torch";

	for (size_t i = 0; i < sizeof(dtypes) / sizeof(dtypes[0]); i++) {
		const char *name = storage ? dtypes[i].storage : dtypes[i].name;

		if (name && is_global(machine, global, module, name))
			return &dtypes[i];
	}
	return NULL;
}

/* `count` numbers of a tuple, none negative, into the table of numbers. */
static bool take_numbers(struct machine *machine, uint32_t tuple, uint32_t count)
{
	uint32_t at = first_cell(machine, tuple);
	uint64_t *to;

	if (node(machine, tuple)->kind != TUPLE || node(machine, tuple)->count != count)
		return false;
	if (!grow(machine, &machine->numbers, sizeof(*to), count))
		return false;
	to = (uint64_t *)machine->numbers.items + machine->numbers.count;
	for (uint32_t i = 0; i < count; i++, at = cell(machine, at)->next) {
		const struct node *number = node(machine, cell(machine, at)->node);

		if (number->kind != NUMBER || number->number < 0)
			return false;
		to[i] = (uint64_t)number->number;
	}
	machine->numbers.count += count;
	return true;
}

/* Add a text and a NUL; returns where it begins in the table of texts. */
static size_t keep_text(struct machine *machine, const void *bytes, size_t length)
{
	size_t at = machine->texts.count;

	if (length >= TEXTS_MAX - at) {
		too_much(machine, "has longer names than can be looked at");
		return 0;
	}
	if (!grow(machine, &machine->texts, 1, length + 1))
		return 0;
	if (length)
		memcpy((char *)machine->texts.items + at, bytes, length);
	((char *)machine->texts.items)[at + length] = 0;
	machine->texts.count += length + 1;
	return at;
}

/*
 * A tensor is described by its storage - ("storage", class, key, location, elements) - its offset,
 * shape and strides. Until all are found, names and numbers are places in tables that may move.
 */
static void describe(struct machine *machine, uint32_t index)
{
	uint32_t arguments = item(machine, index, 0), storage = item(machine, arguments, 0);
	uint32_t id = item(machine, storage, 0), shape = item(machine, arguments, 2);
	const struct node *key = node(machine, item(machine, id, 2));
	const struct node *location = node(machine, item(machine, id, 3));
	const struct node *offset = node(machine, item(machine, arguments, 1));
	size_t numbers = machine->numbers.count;
	struct pickle_tensor tensor = {
		.name_length = machine->path.count, .key_length = key->text.length,
		.rank = node(machine, shape)->count, .at = node(machine, index)->count,
	};

	tensor.dtype = find_dtype(machine, item(machine, id, 1), true);
	/* What has no class for its storage says its dtype itself. */
	if (!tensor.dtype)
		tensor.dtype = find_dtype(machine, item(machine, arguments, 6), false);
	if (machine->rc || node(machine, storage)->kind != STORAGE ||
	    !is_text(machine, item(machine, id, 0), "storage") || key->kind != TEXT ||
	    !tensor.dtype || offset->kind != NUMBER || offset->number < 0 ||
	    tensor.rank > RANK_MAX ||
	    !take_numbers(machine, shape, tensor.rank) ||
	    !take_numbers(machine, item(machine, arguments, 3), tensor.rank)) {
		machine->at = tensor.at;
		bad(machine, "has a tensor here that is not described as torch does");
		return;
	}
	if (machine->tensors.count >= TENSORS_MAX) {
		too_much(machine, "has more tensors than can be listed");
		return;
	}
	tensor.offset = (uint64_t)offset->number;
	tensor.shape = (const uint64_t *)(uintptr_t)numbers;
	tensor.name = (const char *)(uintptr_t)keep_text(machine, machine->path.items,
							 machine->path.count);
	tensor.key = (const char *)(uintptr_t)keep_text(machine, machine->bytes + key->text.at,
							key->text.length);
	tensor.location = (const char *)(uintptr_t)keep_text(
		machine, machine->bytes + (location->kind == TEXT ? location->text.at : 0),
		location->kind == TEXT ? location->text.length : 0);
	if (!machine->rc && grow(machine, &machine->tensors, sizeof(tensor), 1))
		((struct pickle_tensor *)machine->tensors.items)[machine->tensors.count++] = tensor;
}

/* Lengthen the path by a key; returns how long it was. */
static size_t go_down(struct machine *machine, const struct cell *to)
{
	size_t before = machine->path.count, length;
	const char *text = "?";
	char number[24];

	if (to->key == NAMELESS)
		return before;
	length = 1;
	if (to->key == NUMBERED) {
		length = (size_t)snprintf(number, sizeof(number), "%u", to->index);
		text = number;
	} else if (node(machine, to->key)->kind == NUMBER) {
		length = (size_t)snprintf(number, sizeof(number), "%lld",
					  (long long)node(machine, to->key)->number);
		text = number;
	} else if (node(machine, to->key)->kind == TEXT) {
		length = node(machine, to->key)->text.length;
		text = (const char *)machine->bytes + node(machine, to->key)->text.at;
	}
	if (length >= TEXTS_MAX - before) {
		too_much(machine, "has longer names than can be looked at");
		return before;
	}
	if (!grow(machine, &machine->path, 1, length + 1))
		return before;
	if (before)
		((char *)machine->path.items)[machine->path.count++] = '.';
	if (length)
		memcpy((char *)machine->path.items + machine->path.count, text, length);
	machine->path.count += length;
	return before;
}

static void walk(struct machine *machine, uint32_t index, unsigned int depth)
{
	if (node(machine, index)->kind == TENSOR) {
		describe(machine, index);
		return;
	}
	/* A thing may be a part of itself; classes have no parts. */
	if (node(machine, index)->kind == GLOBAL || machine->on_the_way[index])
		return;
	if (depth > DEPTH_MAX) {
		too_much(machine, "is nested too deeply");
		return;
	}
	machine->on_the_way[index] = 1;
	for (uint32_t at = first_cell(machine, index); at != NONE && !machine->rc;
	     at = cell(machine, at)->next) {
		size_t before;

		if (++machine->steps > STEPS_MAX) {
			too_much(machine, "uses its parts more often than can be followed");
			break;
		}
		if (!has_cells(node(machine, cell(machine, at)->node)->kind))
			continue;
		before = go_down(machine, cell(machine, at));
		if (!machine->rc)
			walk(machine, cell(machine, at)->node, depth + 1);
		machine->path.count = before;
	}
	machine->on_the_way[index] = 0;
}

/* Places in tables become pointers, now that nothing moves any more. */
static void hand_over(struct machine *machine)
{
	struct pickle *pickle = machine->pickle;

	pickle->tensors = machine->tensors.items;
	pickle->count = machine->tensors.count;
	pickle->numbers = machine->numbers.items;
	pickle->texts = machine->texts.items;
	for (size_t i = 0; i < pickle->count; i++) {
		struct pickle_tensor *tensor = &pickle->tensors[i];

		tensor->name = pickle->texts + (uintptr_t)tensor->name;
		tensor->key = pickle->texts + (uintptr_t)tensor->key;
		tensor->location = pickle->texts + (uintptr_t)tensor->location;
		tensor->shape = tensor->rank ? pickle->numbers + (uintptr_t)tensor->shape : NULL;
		tensor->stride = tensor->rank ? tensor->shape + tensor->rank : NULL;
	}
}

static void run(struct machine *machine)
{
	uint32_t result;

	add_node(machine, OTHER);
	while (!machine->rc && step(machine))
		;
	if (machine->rc)
		return;
	result = pop(machine);
	if (!machine->rc && machine->at != machine->length)
		bad(machine, "goes on after its end");
	machine->on_the_way = os_calloc(machine->nodes.count + 1, 1);
	if (!machine->on_the_way && !machine->rc)
		machine->rc = error_sys(machine->err, -ENOMEM, "open", machine->name, -1);
	if (!machine->rc)
		walk(machine, result, 0);
}

int pickle_init(struct pickle *pickle, const char *name, const void *bytes, size_t length,
		uint64_t start, struct pen_error *err)
{
	struct machine machine = {
		.name = name, .bytes = bytes, .length = length, .start = start, .err = err,
		.pickle = pickle,
	};

	memset(pickle, 0, sizeof(*pickle));
	if (length > PICKLE_MAX)
		too_much(&machine, "is larger than can be looked at");
	else
		run(&machine);
	hand_over(&machine);
	free(machine.nodes.items);
	free(machine.cells.items);
	free(machine.stack.items);
	free(machine.marks.items);
	free(machine.memo.items);
	free(machine.path.items);
	free(machine.on_the_way);
	return machine.rc;
}

void pickle_fini(struct pickle *pickle)
{
	free(pickle->tensors);
	free(pickle->numbers);
	free(pickle->texts);
	memset(pickle, 0, sizeof(*pickle));
}
