/* SPDX-License-Identifier: MIT */
#ifndef FORMAT_CHECKPOINT_H
#define FORMAT_CHECKPOINT_H
/*
 * A folder of checkpoints; see penstock.h for what it promises. The parts: looking at steps
 * (checkpoint.c), the lock (checkpoint_lock.c), saving one (checkpoint_save.c), verifying and
 * removing them (checkpoint_verify.c, checkpoint_remove.c).
 *
 * Invariants
 *   1. A step exists from the moment on at which its manifest has its name, and until that is
 *      gone. So the manifest comes after the files, and goes, durably, before them.
 *   2. A file that the manifest in sight names is never removed while that manifest is there; one
 *      that it does not name only when the manifest in sight is known to be durable.
 *   3. Nothing is removed that does not have a name of ours, and nothing behind a link.
 */
#include <stdbool.h>
#include "format/manifest.h"
#include "penstock.h"

/* Held by rank 0 while it writes; in a list, so that forked children can let go of it. */
struct checkpoint_lock {
	int fd;				/* -1: not held */
	struct checkpoint_lock *next;
};

struct pen_checkpoints {
	int fd;				/* of the folder */
	char *path;			/* absolute */
	enum pen_mode mode;
	uint32_t rank;
	unsigned int generation;	/* os_generation() of the process that opened it */
	struct checkpoint_lock lock;
	char warning[256];

	/* The step under way. */
	bool begun;
	bool fresh;			/* it did not exist before */
	uint64_t step;
	uint32_t world_size;
	uint32_t turn;			/* of the names of its files */
	char *file;			/* the path of this rank's; NULL: none yet */
};

/*
 * A step as it is now. 0: it is whole, and `checkpoint` is it; -ENOENT: there is no such folder;
 * -ENODATA: it has no manifest; -EBADMSG: it is damaged; others: it could not be looked at. Words
 * for all of them. Release with free().
 */
int checkpoint_look(const struct pen_checkpoints *folder, uint64_t step,
		    struct pen_checkpoint **checkpoint, struct pen_error *err);

/* "PATH/step-00001200/NAME", without the last part for NULL; NULL: no memory. */
char *checkpoint_path(const struct pen_checkpoints *folder, uint64_t step, const char *name);

/* May this handle change anything? -EBADF or -ECHILD with words. */
int checkpoint_may_write(const struct pen_checkpoints *folder, const char *operation,
			 struct pen_error *err);

/* Is the folder that was opened still the one under its path? -ENOENT with words if not. */
int checkpoint_folder_there(const struct pen_checkpoints *folder, const char *operation,
			    struct pen_error *err);

/* -EBUSY with words that name who has it. */
int checkpoint_lock_take(struct pen_checkpoints *folder, struct pen_error *err);
void checkpoint_lock_drop(struct pen_checkpoints *folder);

/* Fill in what is to be said of a file; its tensors are counted only where that is wanted. */
int checkpoint_describe(const char *path, bool count_tensors, struct pen_checkpoint_file *file,
			struct pen_error *err);

/* The folder of a step, if it is one of its own; not behind a link. */
int checkpoint_open_step(const struct pen_checkpoints *folder, uint64_t step);

/*
 * Remove from the folder of a step what is ours and what `keep`, the manifest in sight, does not
 * name; NULL: there is no manifest. It is made durable before that this is so. Who is told of each
 * name may be NULL. Returns the first error; the rest is removed all the same.
 */
struct checkpoint_told {
	void (*removed)(struct checkpoint_told *told, const char *name, uint64_t bytes);
	void (*left)(struct checkpoint_told *told, const char *name);
	bool dry;			/* only tell */
};
int checkpoint_tidy(int step_fd, const struct pen_checkpoint *keep, struct checkpoint_told *told);

/* Take the manifest away; checkpoint_tidy() makes that durable before any file goes. */
int checkpoint_unname(int step_fd);

#endif
