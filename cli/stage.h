/* SPDX-License-Identifier: MIT */
#ifndef CLI_STAGE_H
#define CLI_STAGE_H
/*
 * A hidden folder of our own while something is made: beside a folder that is to be, which it
 * becomes by one rename, or inside one that is there, where it keeps what is being replaced.
 *
 * Whoever made it holds a lock on it. A lock that can be had proves that nobody is at work there
 * any more, and then it is swept away by the next one in the same place. Where the file system has
 * no locks, nothing is swept.
 */
#include <stdbool.h>
#include "penstock.h"

struct stage {
	char *path;	/* heap; NULL: there is none */
	int fd;		/* holds the lock */
};

/* Make one in `parent`; `prefix` says of whom, and is the beginning of a hidden name. */
int stage_open(struct stage *stage, const char *parent, const char *prefix, struct pen_error *err);

/* Remove what is in it and the folder itself; one that was renamed is gone already. */
void stage_close(struct stage *stage);

/* Sweep away what others of the same prefix left in `parent`. Is one of them still at work? */
bool stage_sweep(const char *parent, const char *prefix);

/* Make one beside a folder that is to be; after an error the words are of that folder. */
int stage_beside(struct stage *stage, const char *folder, struct pen_error *err);

/* Give it the name of that folder, for good. One of that name may be there if it is empty. */
int stage_publish(const struct stage *stage, const char *folder, struct pen_error *err);

/* Make the names in a folder durable. */
void stage_flush(const char *folder);

#endif
