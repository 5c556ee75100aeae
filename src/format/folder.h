/* SPDX-License-Identifier: MIT */
#ifndef FORMAT_FOLDER_H
#define FORMAT_FOLDER_H
/*
 * A folder in which one model takes the place of another. Files get their names one after the
 * other, and may bear those of the older model: so the index decides. Who follows it finds, at
 * every instant, all of the old model or all of the new one:
 *
 *   folder_prepare   old files whose names are wanted get second names, and the index leads there
 *   (commit files)   nobody is led to them yet
 *   (commit index)   the one step that counts
 *   folder_finish    what is not the new model's goes: second names, files of the old one, and the
 *                    index where the new model is one file
 *   folder_undo      instead, where a file could not be committed: names and index as before
 *
 * After a kill the next save into the folder finds one of these states and finishes it.
 *
 * Where no second names are to be had (a file system without links) files are replaced as they
 * come; a kill in that moment may leave the old index with files of both.
 */
#include <limits.h>
#include <stdbool.h>
#include <stddef.h>
#include "penstock.h"

struct folder {
	int fd;
	const char *path;
	const struct pen_layout *layout; /* of the new model */
	bool *fresh;			/* new files whose names were free; NULL: unknown */
	struct pen_model *old;		/* NULL: there was none, or nothing has to be kept */
	char (*second)[NAME_MAX + 1];	/* of the old model's files; "": keeps its own */
	char index[NAME_MAX + 1];	/* the old index is kept under this name; "": none */
};

/* When all of the new model is durable and nothing has its name. After an error all is as it
 * was. */
int folder_prepare(struct folder *folder, struct pen_error *err);
void folder_undo(struct folder *folder);
void folder_finish(struct folder *folder);

/* In any case, at the end. */
void folder_fini(struct folder *folder);

/* Put a small text in place: durable, or not at all. */
int folder_write(const struct folder *folder, const char *name, const void *text, size_t size,
		 struct pen_error *err);

/* Is there an index now? */
bool folder_has_index(const struct folder *folder);

#endif
