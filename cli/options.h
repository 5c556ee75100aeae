/* SPDX-License-Identifier: MIT */
#ifndef CLI_OPTIONS_H
#define CLI_OPTIONS_H
/*
 * One table entry per option: its names, what it takes, where the value goes, what it is for.
 * Parsing, error messages, --help and the list that the man pages are checked against all come
 * from that entry, so they cannot disagree. A command is its table plus a function.
 */
#include <stddef.h>
#include <stdint.h>
#include "penstock.h"

/* What an option takes, and the type of the field it is stored in. */
enum option_kind {
	OPTION_FLAG,		/* nothing; bool */
	OPTION_SIZE,		/* "64M"; uint64_t */
	OPTION_NUMBER,		/* uint32_t */
	OPTION_CHOICE,		/* one of `choices`; int, its index */
	OPTION_TRANSFER,	/* what pen_transfer_parse() takes; int */
	OPTION_TEXT,		/* const char * */
	OPTION_HELP,		/* nothing; prints the help */
};

struct option_entry {
	const char *name;		/* without the dashes; NULL ends a table */
	char letter;			/* the short form, or 0 */
	enum option_kind kind;
	const char *argument;		/* what help calls the value */
	uint64_t min, max;		/* of a size or a number, both included */
	const char *const *choices;	/* ends with NULL */
	size_t where;			/* offset in the command's settings */
	const char *help;
};

struct command {
	const char *name;
	const char *operands;		/* as help shows them: "SRC DST" */
	int operand_count;
	const char *summary;		/* one line in the list of commands */
	const char *description;	/* above the options in --help */
	const struct option_entry *options;
	int (*run)(int argc, char **argv);	/* arguments after the name; exit status */
};

/*
 * Store the options of `argv` in `settings` and move the operands to its front. Returns 0, 1 where
 * help was asked for and has been printed, or -EINVAL. The arguments after a wrong one are still
 * looked at, so that --json says how to tell the error wherever it stands.
 */
int options_parse(const struct command *command, int argc, char **argv, void *settings,
		  struct pen_error *err);

/* The entry of `names` that was probably meant by `word`, or NULL. `stride` is between entries. */
const char *options_nearest(const char *word, const void *names, size_t stride);

#endif
