/* SPDX-License-Identifier: MIT */
/*
 * The power goes at any moment in the life of a folder of checkpoints: it is made, steps are saved
 * by two ranks, one is replaced, one abandoned, old ones are removed. From the log of power.h every
 * crash point is played: of the names in a folder that were changed since it was flushed, any may
 * have changed and any not; a file that was written and not flushed since is torn.
 *
 * In each outcome: a step that has a manifest has all files that this manifest was written for, and
 * no other in their place, flushed; the manifest itself is whole. And a step whose commit has
 * returned last is there, with all folders above it.
 *
 * Not covered: what tests/crash/test_power.c says that it does not cover.
 */
#include "../conform/steps.h"
#include "power.h"

#define NAMES_MAX 512
#define RANKS 2

/* ------------------------------------------------------------------------------ playing it -- */

/* What each manifest was written for, by its inode: noted when it was committed. */
static struct promise {
	ino_t manifest, files[RANKS];
	char names[RANKS][32];
} promises[64];
static unsigned int promise_count;

/* The names that are left of all folders, in one outcome. */
static struct entry {
	ino_t folder, inode;
	char name[40];
} entries[NAMES_MAX];
static unsigned int entry_count;

static struct entry *find(ino_t folder, const char *name)
{
	for (unsigned int i = 0; i < entry_count; i++)
		if (entries[i].folder == folder && !strcmp(entries[i].name, name))
			return &entries[i];
	return NULL;
}

static void apply(const struct event *event)
{
	struct entry *entry = find(event->folder, event->name);

	if (!entry && event->kind == NAME) {
		CHECK(entry_count < NAMES_MAX);
		entry = &entries[entry_count++];
		entry->folder = event->folder;
		strcpy(entry->name, event->name);
	}
	if (entry && event->kind == NAME)
		entry->inode = event->inode;
	else if (entry)
		*entry = entries[--entry_count];
}

static bool is_torn(ino_t file, unsigned int cut)
{
	for (unsigned int i = 0; i < cut; i++)
		if (events[i].kind == WRITE && events[i].inode == file && !flushed(i, cut, file))
			return true;
	return false;
}

static void fail(unsigned int cut, const char *what, const char *name)
{
	fprintf(stderr, "power lost after event %u of %u: %s %s\n", cut, event_count, what, name);
	exit(1);
}

/* A step with a manifest is as that promises. */
static void check_step(unsigned int cut, const struct entry *step)
{
	const struct entry *manifest = find(step->inode, "manifest.json"), *file;
	const struct promise *promise = NULL;

	if (!manifest)
		return;
	for (unsigned int i = 0; i < promise_count; i++)
		if (promises[i].manifest == manifest->inode)
			promise = &promises[i];
	if (!promise || is_torn(manifest->inode, cut))
		fail(cut, "the manifest may be torn of", step->name);
	for (unsigned int i = 0; i < RANKS; i++) {
		file = find(step->inode, promise->names[i]);
		if (!file || file->inode != promise->files[i])
			fail(cut, "a file may be missing of", step->name);
		if (is_torn(file->inode, cut))
			fail(cut, "a file may be torn of", step->name);
	}
}

static char folder[600];
static ino_t root, above, inside;	/* the folders on the way to the steps */

/* The last step that was committed is there. */
static void check_committed(unsigned int cut)
{
	uint64_t last = 0;
	char name[40];
	struct entry *step;

	for (unsigned int i = 0; i < cut; i++)
		if (events[i].kind == DONE && events[i].step > last)
			last = events[i].step;
	if (!last)
		return;
	snprintf(name, sizeof(name), "step-%08llu", (unsigned long long)last);
	step = find(inside, name);
	if (!find(root, "a") || !find(above, "b") || !step || !find(step->inode, "manifest.json"))
		fail(cut, "what was committed may be gone:", name);
}

static void lose_power(unsigned int cut)
{
	entry_count = 0;
	for (unsigned int i = 0; i < cut; i++)
		if ((events[i].kind == NAME || events[i].kind == UNNAME) &&
		    (flushed(i, cut, events[i].folder) || coin(2)))
			apply(&events[i]);
	for (unsigned int i = 0; i < entry_count; i++)
		if (entries[i].folder == inside && !strncmp(entries[i].name, "step-", 5))
			check_step(cut, &entries[i]);
	check_committed(cut);
}

/* ------------------------------------------------------------------------------ what is done -- */

static struct pen_checkpoints *ranks[RANKS];

static void promise(uint64_t step, const struct pen_checkpoint_file *files)
{
	struct promise *made = &promises[promise_count++];
	char path[700];

	snprintf(path, sizeof(path), "%s/step-%08llu/manifest.json", folder,
		 (unsigned long long)step);
	made->manifest = inode_named(path);
	for (unsigned int i = 0; i < RANKS; i++) {
		snprintf(path, sizeof(path), "%s/step-%08llu/%.31s", folder,
			 (unsigned long long)step, files[i].name);
		made->files[i] = inode_named(path);
		strcpy(made->names[i], files[i].name);
		CHECK(made->files[i] != 0);
	}
	CHECK(made->manifest != 0 && promise_count < COUNT(promises));
}

static void save(uint64_t step, uint32_t flags, bool commit)
{
	struct pen_checkpoint_file files[RANKS];
	const char *path;

	for (unsigned int i = 0; i < RANKS; i++) {
		OK(pen_checkpoints_begin(ranks[i], step, RANKS, flags, &path, &kit_err));
		OK(step_write(path, (unsigned int)step + i + 7 * flags, &kit_err));
		OK(pen_checkpoints_describe(ranks[i], &files[i], &kit_err));
	}
	if (commit) {
		OK(pen_checkpoints_commit(ranks[0], files, RANKS, NULL, &kit_err));
		note(&(struct event){ .kind = DONE, .step = step });
		promise(step, files);
	}
	for (unsigned int i = commit; i < RANKS; i++)
		OK(pen_checkpoints_abandon(ranks[i], &kit_err));
}

static void remove_old(uint32_t keep)
{
	struct pen_checkpoint_removal *removal;

	OK(pen_checkpoints_gc(ranks[0], keep, 0, &removal, &kit_err));
	CHECK(removal->step_count > 0);
	pen_checkpoint_removal_free(removal);
	OK(pen_checkpoints_sweep(ranks[0], 0, &removal, &kit_err));
	pen_checkpoint_removal_free(removal);
}

TEST(power_lost_at_any_moment_leaves_what_was_committed_and_nothing_half)
{
	struct pen_checkpoint_list *list;

	snprintf(folder, sizeof(folder), "%s", in_scratch("a/b"));
	root = inode_named(in_scratch("."));
	recording = true;
	for (unsigned int i = 0; i < RANKS; i++)
		ranks[i] = steps_open(folder, PEN_WRITE, i);
	above = inode_named(in_scratch("a"));
	inside = inode_named(folder);
	save(1, 0, true);
	save(2, 0, true);
	save(2, PEN_CHECKPOINT_OVERWRITE, true);
	save(2, PEN_CHECKPOINT_OVERWRITE, false);
	save(3, 0, false);
	save(3, 0, true);
	remove_old(2);
	save(4, 0, true);
	remove_old(1);
	recording = false;
	OK(pen_checkpoints_list(ranks[0], &list, &kit_err));
	CHECK_EQ(list->count, 1);
	CHECK_EQ(list->steps[0].step, 4);
	pen_checkpoint_list_free(list);
	CHECK(event_count > 100 && promise_count == 5);
	for (unsigned int cut = 0; cut <= event_count; cut++)
		for (int outcome = 0; outcome < 40; outcome++)
			lose_power(cut);
	for (unsigned int i = 0; i < RANKS; i++)
		pen_checkpoints_close(ranks[i]);
}

TEST_MAIN
