/* SPDX-License-Identifier: MIT */
/* Options by table: parsing, messages, help; see options.h. */
#include <errno.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>
#include "base/error.h"
#include "base/text.h"
#include "options.h"

#define HELP_WIDTH 80

const char *const options_cache[] = { "auto", "keep", "after", "drop", "off", NULL };

static bool takes_value(const struct option_entry *option)
{
	return option->kind != OPTION_FLAG && option->kind != OPTION_HELP;
}

/* ---------------------------------------------------------------------------- near misses -- */

/* Letters to change, add or leave out to get from one word to the other. */
static size_t distance(const char *a, const char *b)
{
	size_t row[32], length = strlen(b);

	if (length >= sizeof(row) / sizeof(row[0]))
		return SIZE_MAX;
	for (size_t j = 0; j <= length; j++)
		row[j] = j;
	for (size_t i = 1; a[i - 1]; i++) {
		size_t diagonal = row[0];

		row[0] = i;
		for (size_t j = 1; j <= length; j++) {
			size_t best = diagonal + (a[i - 1] != b[j - 1]);

			diagonal = row[j];
			if (row[j] + 1 < best)
				best = row[j] + 1;
			if (row[j - 1] + 1 < best)
				best = row[j - 1] + 1;
			row[j] = best;
		}
	}
	return row[length];
}

const char *options_nearest(const char *word, const void *names, size_t stride)
{
	const char *nearest = NULL;
	size_t best = strlen(word) / 3 + 2;	/* farther than this is a guess, not a slip */

	for (const char *entry = names;; entry += stride) {
		const char *name;

		memcpy(&name, entry, sizeof(name));
		if (!name)
			return nearest;
		/* A word that was cut short is meant even where much is missing. */
		size_t far = word[0] && !strncmp(word, name, strlen(word)) ? 1
									   : distance(word, name);
		if (far < best) {
			best = far;
			nearest = name;
		}
	}
}

/* ----------------------------------------------------------------------------------- help -- */

/* What help calls the value: its name, or the choices themselves. */
static const char *value_name(const struct option_entry *option, char *text, size_t size)
{
	size_t used = 0;

	if (!option->choices)
		return option->argument ? option->argument : "";
	for (size_t i = 0; option->choices[i] && used < size; i++)
		used += (size_t)snprintf(text + used, size - used, "%s%s", i ? "|" : "",
					 option->choices[i]);
	return text;
}

/* Print `text` from column `indent` on, broken between words. */
static void print_wrapped(const char *text, int indent, int column)
{
	while (*text) {
		int word = (int)strcspn(text, " ");

		if (column > indent && column + 1 + word > HELP_WIDTH) {
			printf("\n%*s", indent, "");
			column = indent;
		} else if (column > indent) {
			putchar(' ');
			column++;
		}
		printf("%.*s", word, text);
		column += word;
		text += word;
		text += strspn(text, " ");
	}
	putchar('\n');
}

static void print_option(const struct option_entry *option)
{
	char choices[64], left[64], letter[8] = "    ", range[64] = "", help[512];
	const char *value = value_name(option, choices, sizeof(choices));
	const int indent = 28;

	if (option->letter)
		snprintf(letter, sizeof(letter), "-%c, ", option->letter);
	snprintf(left, sizeof(left), "  %s--%s %s", letter, option->name, value);
	if (option->kind == OPTION_NUMBER)
		snprintf(range, sizeof(range), " (%llu to %llu)", (unsigned long long)option->min,
			 (unsigned long long)option->max);
	snprintf(help, sizeof(help), "%s%s", option->help, range);
	printf("%-*s", indent, left);
	if (strlen(left) >= (size_t)indent)
		printf("\n%*s", indent, "");
	print_wrapped(help, indent, indent);
}

static void print_help(const struct command *command)
{
	printf("Usage: penstock %s [OPTIONS] %s%s\n\n", command->name, command->operands,
	       command->more_operands ? "..." : "");
	print_wrapped(command->description, 0, 0);
	printf("\nOptions:\n");
	for (const struct option_entry *option = command->options; option->name; option++)
		print_option(option);
	printf("\nSee also: man penstock-%s\n", command->name);
}

/* The table for programs: name, letter and value, tab between, a line each. */
static void print_table(const struct command *command)
{
	char choices[64];

	for (const struct option_entry *option = command->options; option->name; option++)
		printf("--%s\t%s%.1s\t%s\n", option->name, option->letter ? "-" : "",
		       &option->letter, value_name(option, choices, sizeof(choices)));
}

/* -------------------------------------------------------------------------------- parsing -- */

static int wrong_value(const struct option_entry *option, const char *shown, const char *text,
		       struct pen_error *err)
{
	char list[64], low[TEXT_SIZE_MAX], high[TEXT_SIZE_MAX];

	switch (option->kind) {
	case OPTION_CHOICE:
	case OPTION_CACHE:
		return error_set(err, -EINVAL, "use", shown, -1, "'%s' is not one of %s", text,
				 value_name(option, list, sizeof(list)));
	case OPTION_NUMBER:
		return error_set(err, -EINVAL, "use", shown, -1,
				 "'%s' is not a whole number from %llu to %llu", text,
				 (unsigned long long)option->min, (unsigned long long)option->max);
	default:
		error_set(err, -EINVAL, "use", shown, -1, "'%s' is not a size from %s to %s", text,
			  text_from_size(option->min, low, sizeof(low)),
			  text_from_size(option->max, high, sizeof(high)));
		error_hint(err, "Write bytes, or 64K, 1.5M, 2G (powers of 1024), 2GB (of 1000)");
		return -EINVAL;
	}
}

static int append(struct option_list *list, const char *shown, const char *text,
		  struct pen_error *err)
{
	if (list->count == OPTION_LIST_MAX)
		return error_set(err, -EINVAL, "use", shown, -1,
				 "it can be given %d times at most", OPTION_LIST_MAX);
	list->items[list->count++] = text;
	return 0;
}

/* What frameworks call cpu is host here. Whether there is such a GPU is found out later. */
static int store_device(const char **field, const char *shown, const char *text,
			struct pen_error *err)
{
	uint64_t number;

	if (!strcmp(text, "host") || !strcmp(text, "host:") || !strcmp(text, "cpu")) {
		*field = "host";
		return 0;
	}
	if (!strcmp(text, "cuda") ||
	    (!strncmp(text, "cuda:", 5) && !text_to_number(text + 5, GPU_MAX, &number))) {
		*field = text;
		return 0;
	}
	error_set(err, -EINVAL, "use", shown, -1, "'%s' is no device", text);
	error_hint(err, "Devices are cuda:N, N from 0, and host (or cpu)");
	return -EINVAL;
}

/* By a word, or by what the environment says where there is none. */
static int store_cache(int *field, const char *text, struct pen_error *err)
{
	int rc = pen_cache_parse(text, field, err);

	/* A command ends when it is done, and nothing goes on in the background. */
	if (!rc && *field == PEN_CACHE_AFTER_UNASKED)
		*field = PEN_CACHE_AUTO;
	return rc;
}

/* `shown` is the option as the user wrote it. */
static int store(const struct option_entry *option, const char *shown, const char *text,
		 void *settings, struct pen_error *err)
{
	void *field = (char *)settings + option->where;
	struct pen_error cause;
	uint64_t number = 0;
	int rc = 0;

	switch (option->kind) {
	case OPTION_FLAG:
		*(bool *)field = true;
		return 0;
	case OPTION_TEXT:
		*(const char **)field = text;
		return 0;
	case OPTION_DEVICE:
		return store_device(field, shown, text, err);
	case OPTION_LIST:
		return append(field, shown, text, err);
	case OPTION_TRANSFER:
		rc = pen_transfer_parse(text, field, &cause);
		if (rc) {
			error_set(err, -EINVAL, "use", shown, -1, "'%s': %s", text, cause.message);
			error_hint(err, "%s", cause.hint);
		}
		return rc;
	case OPTION_CACHE:
		return store_cache(field, text, &cause) ? wrong_value(option, shown, text, err) : 0;
	case OPTION_CHOICE:
		for (int i = 0; option->choices[i]; i++) {
			if (!strcmp(text, option->choices[i])) {
				*(int *)field = i;
				return 0;
			}
		}
		return wrong_value(option, shown, text, err);
	case OPTION_SIZE:
		rc = text_to_size(text, &number);
		break;
	default:
		rc = text_to_number(text, option->max, &number);
	}
	if (rc || number < option->min || number > option->max)
		return wrong_value(option, shown, text, err);
	if (option->kind == OPTION_SIZE)
		*(uint64_t *)field = number;
	else
		*(uint32_t *)field = (uint32_t)number;
	return 0;
}

/* What one pass over the arguments carries along. */
struct parser {
	const struct command *command;
	void *settings;
	int next, argc;		/* the argument to look at next, of how many */
	char **argv;
	bool help, table;	/* asked for */
	bool cache;		/* said what to leave in the page cache */
	struct pen_error *err;
};

/* The option's value: what is attached to it, else the next argument. */
static int apply(struct parser *parser, const struct option_entry *option, const char *shown,
		 const char *attached)
{
	const char *value = attached;

	if (option->kind == OPTION_HELP) {
		parser->help = true;
		return 0;
	}
	if (!takes_value(option) && attached)
		return error_set(parser->err, -EINVAL, "use", shown, -1, "it takes no value");
	if (takes_value(option) && !attached) {
		if (parser->next == parser->argc) {
			char list[64];

			error_set(parser->err, -EINVAL, "use", shown, -1, "its value is missing");
			error_hint(parser->err, "Write %s %s", shown,
				   value_name(option, list, sizeof(list)));
			return -EINVAL;
		}
		value = parser->argv[parser->next++];
	}
	parser->cache |= option->kind == OPTION_CACHE;
	return store(option, shown, value, parser->settings, parser->err);
}

/* What was not said may be said by the environment. */
static int apply_environment(struct parser *parser)
{
	const struct option_entry *option = parser->command->options;

	while (option->name && option->kind != OPTION_CACHE)
		option++;
	if (!option->name || parser->cache)
		return 0;
	return store_cache((int *)((char *)parser->settings + option->where), NULL, parser->err);
}

static int unknown(struct parser *parser, const char *shown, const char *near)
{
	error_set(parser->err, -EINVAL, "use", shown, -1, "there is no such option");
	if (near)
		error_hint(parser->err, "Did you mean --%s?", near);
	else
		error_hint(parser->err, "'penstock %s --help' lists them", parser->command->name);
	return -EINVAL;
}

static int parse_long(struct parser *parser, const char *argument)
{
	const struct option_entry *options = parser->command->options;
	size_t length = strcspn(argument + 2, "=");
	const char *value = argument[2 + length] ? argument + 2 + length + 1 : NULL;
	char name[64];

	text_copy(name, length + 1 < sizeof(name) ? length + 1 : sizeof(name), argument + 2);
	if (!strcmp(name, "help-options")) {
		parser->table = true;
		return 0;
	}
	char shown[sizeof(name) + 2];

	snprintf(shown, sizeof(shown), "--%s", name);
	for (const struct option_entry *option = options; option->name; option++)
		if (!strcmp(name, option->name))
			return apply(parser, option, shown, value);
	return unknown(parser, shown, options_nearest(name, options, sizeof(*options)));
}

/* One or more letters behind a dash; a letter that takes a value takes the rest as it. */
static int parse_letters(struct parser *parser, const char *letter)
{
	for (; *letter; letter++) {
		const struct option_entry *option = parser->command->options;
		char shown[] = { '-', *letter, 0 };
		int rc;

		while (option->name && option->letter != *letter)
			option++;
		if (!option->name)
			return unknown(parser, shown, NULL);
		if (takes_value(option))
			return apply(parser, option, shown, letter[1] ? letter + 1 : NULL);
		rc = apply(parser, option, shown, NULL);
		if (rc)
			return rc;
	}
	return 0;
}

static void wrong_count(const struct command *command, int given, struct pen_error *err)
{
	bool less = given < command->operand_count;

	if (!given)
		error_set(err, -EINVAL, command->name, "", -1, "%s %s missing", command->operands,
			  command->operand_count == 1 ? "is" : "are");
	else
		error_set(err, -EINVAL, command->name, "", -1,
			  "it takes %s%s, and %s%d argument%s given", command->operands,
			  less ? "" : " and nothing else", less ? "only " : "", given,
			  given == 1 ? " was" : "s were");
}

int options_parse(const struct command *command, int argc, char **argv, void *settings,
		  struct pen_error *err)
{
	struct pen_error ignored;
	struct parser parser = {
		.command = command, .settings = settings, .argc = argc, .argv = argv, .err = err,
	};
	bool only_operands = false;
	int operands = 0, first = 0;

	while (parser.next < argc) {
		char *argument = argv[parser.next++];
		int rc = 0;

		if (only_operands || argument[0] != '-' || !argument[1])
			argv[operands++] = argument;
		else if (!strcmp(argument, "--"))
			only_operands = true;
		else if (argument[1] == '-')
			rc = parse_long(&parser, argument);
		else
			rc = parse_letters(&parser, argument + 1);
		if (rc && !first) {
			first = rc;
			parser.err = &ignored;
		}
	}
	if (parser.table)
		print_table(command);
	else if (parser.help)
		print_help(command);
	if (parser.table || parser.help)
		return 1;
	if (!first)
		first = apply_environment(&parser);
	if (first)
		return first;
	argv[operands] = NULL;
	if (operands < command->operand_count ||
	    (operands > command->operand_count + command->operands_optional &&
	     !command->more_operands)) {
		wrong_count(command, operands, err);
		error_hint(err, "See 'penstock %s --help'", command->name);
		return -EINVAL;
	}
	for (int i = 0; i < operands; i++)
		if (!argv[i][0]) {
			error_set(err, -EINVAL, command->name, "", -1, "an argument is empty");
			error_hint(err, "It takes %s; a variable of a script may not be set",
				   command->operands);
			return -EINVAL;
		}
	return 0;
}

int options_check(const struct pen_options *options, struct pen_error *err)
{
	struct pen_options any = *options;
	struct pen_device *host;
	int rc = pen_device_open("host", &host, err);

	if (rc)
		return rc;
	/* Nothing is moved, but the options are looked at. Which types of transfer can be had is a
	 * question to the real device. */
	any.transfer = PEN_AUTO;
	rc = pen_transfer(PEN_READ, host, NULL, 0, &any, NULL, err);
	pen_device_close(host);
	return rc;
}
