/* SPDX-License-Identifier: MIT */
#ifndef FORMAT_MANIFEST_H
#define FORMAT_MANIFEST_H
/*
 * The manifest of a checkpoint, manifest.json, and the names of its files. Pure functions over
 * bytes: strangers may have written them.
 *
 * True of every manifest that is accepted:
 *   1. Every member is there once, and no other. It is of the step that was asked for.
 *   2. There is one file for each rank, in their order, and its name is one that
 *      manifest_file_name() makes for that rank: no other file can be meant.
 *   3. The sizes, added up, fit into 63 bits.
 *   4. `user` is a JSON object.
 */
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include "penstock.h"

#define MANIFEST "manifest.json"
#define MANIFEST_SIZE_MAX (64u << 20)
#define MANIFEST_RANKS_MAX 100000u	/* so that each has five digits */
#define MANIFEST_NUMBER_MAX ((uint64_t)INT64_MAX)
#define MANIFEST_STEP_NAME 32		/* bytes that the name of a step's folder needs */

/* What to do about a step whose manifest, or one of whose files, is not what it was. */
#define MANIFEST_DAMAGED "This step is damaged: restore an earlier one; 'penstock ckpt verify " \
	"--all' says which are whole. Saving it again with permission to overwrite replaces it, " \
	"and 'penstock ckpt gc' removes it when later ones are there"

/* `name` is for messages. Release with free(). */
int manifest_parse(const char *name, const void *bytes, size_t length, uint64_t step,
		   struct pen_checkpoint **checkpoint, struct pen_error *err);

/* Its text, for files that keep the promises above; what does not is -EINVAL with words. */
int manifest_write(const struct pen_checkpoint *checkpoint, char **text, size_t *size,
		   struct pen_error *err);

/* "2026-11-17T02:30:00Z" of seconds since 1970. */
void manifest_time(uint64_t seconds, char time[24]);

/* "rank-00003.pt", or "rank-00003.2.pt" where it is the third of its name; and back: false for any
 * other text. */
void manifest_file_name(uint32_t rank, uint32_t turn, char name[32]);
bool manifest_file_parse(const char *name, uint32_t *rank, uint32_t *turn);

/* "step-00001200", and back. */
void manifest_step_name(uint64_t step, char name[MANIFEST_STEP_NAME]);
bool manifest_step_parse(const char *name, uint64_t *step);

#endif
