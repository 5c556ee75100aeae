/* SPDX-License-Identifier: MIT */
#ifndef IO_REPLACE_H
#define IO_REPLACE_H
/*
 * A file that will take the place of another, or a free one. It is made in the directory of that
 * place and has no name, or a temporary one, until it is published.
 *
 * Invariants
 *   1. A name is resolved once. What happens to the names on the way there afterwards, and where
 *      the process goes meanwhile, changes nothing.
 *   2. Whatever publishing needs is at hand from the start, except for the target's own rights.
 *   3. A new file that has a temporary name while it is written is its owner's alone. The rights it
 *      will have are set when its bytes are durable, right before it is found under the name of
 *      the target.
 */
#include <limits.h>
#include <stdbool.h>
#include <sys/stat.h>

/* Where a name leads: a directory, held open, and a name in it that is no link. */
struct place {
	int directory;			/* -1: none */
	bool listable;			/* the directory may be read, so it can be flushed */
	char base[NAME_MAX + 1];
};

/* `name` starts at the directory `start`, like the paths of os.h. -EISDIR if it ends in a slash. */
int place_find(int start, const char *name, struct place *place);
/* Make the names in it durable; `fd` is any file there. */
int place_flush(const struct place *place, int fd);
void place_leave(struct place *place);

struct replacement {
	struct place place;
	char temporary[NAME_MAX + 1];	/* "" while the new file has no name */
	mode_t mode;			/* that a file gets which is plainly created there */
	bool locked;			/* it is to be, while it has a temporary name */
};

/* Each of these says in `step` what failed, in words that the target's name follows. */
int replacement_create(struct replacement *new, const char **step);	/* its descriptor */
/* Before anything is written to it: with a name, it is its owner's alone until it is published. */
int replacement_name(struct replacement *new, int fd, const char **step);
/* When its bytes are durable. */
int replacement_publish(struct replacement *new, int fd, const char **step);

/* Give the file the rights of the one it replaces, and what else is attached to that; where there
 * is none its mode is `fresh`, and 1 is returned. (inherit.c) */
int inherit(const struct place *place, int fd, mode_t fresh, const char **step);

/* Temporary names, and what is left under them (leftovers.c). A sweep never fails: what cannot be
 * removed stays. */
int leftover_name(const char *base, char name[NAME_MAX + 1]);
bool leftover_is(const char *name);
bool leftover_has_name(int directory, const char *name, int fd);
bool leftover_remove(int directory, const char *name);	/* if nobody has it locked */
void leftovers_sweep(const struct place *place);
bool leftovers_are_swept(const struct place *place);

/* Not published, and not to be: no name stays. */
void replacement_drop(struct replacement *new);

#endif
