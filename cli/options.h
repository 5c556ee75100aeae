/* SPDX-License-Identifier: MIT */
#ifndef CLI_OPTIONS_H
#define CLI_OPTIONS_H
/*
 * One table entry per option: its names, what it takes, where the value goes, what it is for.
 * Parsing, error messages, --help and the list that the man pages are checked against all come
 * from that entry, so they cannot disagree. A command is its table plus a function.
 */
#include <stdbool.h>
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
	OPTION_CACHE,		/* what pen_cache_parse() takes, with `choices` for help; int */
	OPTION_DEVICE,		/* "cuda:N", "host" or "cpu"; const char *, as the engine has it */
	OPTION_TEXT,		/* const char * */
	OPTION_LIST,		/* a text, as often as wanted; struct option_list */
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

#define OPTION_LIST_MAX 64

struct option_list {
	size_t count;
	const char *items[OPTION_LIST_MAX];
};

/*
 * Options that several commands have, for tables of commands whose struct settings has `device`,
 * `repeat` and, for those that go to the engine as they are, `engine`, a struct pen_options.
 */
#define OPTIONS_TRANSFER \
	{ "transfer", 't', OPTION_TRANSFER, "TYPE", \
	  .where = offsetof(struct settings, engine.transfer), \
	  .help = "How bytes travel: auto (the best path for each range), or a type by number " \
		  "or name, such as 3 or CPU_ASYNC_GPU" }
#define OPTIONS_DEVICE(what) \
	{ "device", 'd', OPTION_DEVICE, "DEVICE", .where = offsetof(struct settings, device), \
	  .help = "Where the " what " are to land: host (or cpu) or cuda:N; otherwise cuda:0, or " \
		  "host where there is none" }
#define OPTIONS_REPEAT(what) \
	{ "repeat", 'n', OPTION_NUMBER, "N", .where = offsetof(struct settings, repeat), \
	  .min = 1, .max = RUNS_MAX, .help = what " so often, and tell the median" }
#define OPTIONS_ENGINE \
	{ "memory-limit", 0, OPTION_SIZE, "SIZE", \
	  .where = offsetof(struct settings, engine.memory_limit), .min = OPTIONS_MEMORY_LEAST, \
	  .max = INT64_MAX, .help = "Use at most this much memory on the way; otherwise 128M" }, \
	{ "lanes", 0, OPTION_NUMBER, "N", .where = offsetof(struct settings, engine.lanes), \
	  .min = 1, .max = 64, .help = "Threads that move bytes" }, \
	{ "depth", 0, OPTION_NUMBER, "N", .where = offsetof(struct settings, engine.depth), \
	  .min = 1, .max = 4096, .help = "Requests in flight over all lanes" }, \
	{ "request-size", 0, OPTION_SIZE, "SIZE", \
	  .where = offsetof(struct settings, engine.request_size), .min = 4096, .max = 1 << 30, \
	  .help = "Bytes of one request; otherwise found while running" }, \
	{ "cache", 0, OPTION_CACHE, .choices = options_cache, \
	  .where = offsetof(struct settings, engine.cache), \
	  .help = "What to leave in the page cache: everything (keep), everything but read a " \
		  "second time afterwards, which is waited for (after), nothing (drop), or what " \
		  "the path leaves (auto, off)" }, \
	{ "inject", 0, OPTION_TEXT, "SPEC", .where = offsetof(struct settings, engine.inject), \
	  .help = "Make requests fail, for tests: fail:3:EIO, short:1, delay:5%:50ms, corrupt:2" }
#define GPU_MAX 255	/* the highest N of cuda:N; the engine's own limit */
#define OPTIONS_MEMORY_LEAST ((uint64_t)64 << 10)	/* what the engine asks for at least */

extern const char *const options_cache[];

struct command {
	const char *name;
	const char *operands;		/* as help shows them: "SRC DST" */
	int operand_count;
	bool more_operands;		/* the last one may be given more than once */
	int operands_optional;		/* further ones that may be left out */
	const char *const *operand_choices;	/* what they can be; NULL: names of files */
	const char *const *first_choices;	/* the same for the first one alone */
	const char *summary;		/* one line in the list of commands */
	const char *description;	/* above the options in --help */
	const struct option_entry *options;
	int (*run)(int argc, char **argv);	/* arguments after the name; exit status */
};

/*
 * Store the options of `argv`, which ends with NULL as main()'s does, in `settings`, and move the
 * operands to its front, with NULL after the last. Returns 0, 1 where help was asked for and has
 * been printed, or -EINVAL. The arguments after a wrong one are still looked at, so that --json
 * says how to tell the error wherever it stands.
 */
int options_parse(const struct command *command, int argc, char **argv, void *settings,
		  struct pen_error *err);

/*
 * What the engine would say of the options for it, before anything is opened: what it refuses is a
 * wrong call, not a failure.
 */
int options_check(const struct pen_options *options, struct pen_error *err);

/* The entry of `names` that was probably meant by `word`, or NULL. `stride` is between entries. */
const char *options_nearest(const char *word, const void *names, size_t stride);

#endif
