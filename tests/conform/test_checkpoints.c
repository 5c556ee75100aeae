/* SPDX-License-Identifier: MIT */
/*
 * Folders of checkpoints from outside: who may write, when a step exists, what is removed and what
 * never is. Losing power and being killed are in tests/crash, calls that fail in tests/fault.
 */
#include <errno.h>
#include <pthread.h>
#include <sys/file.h>
#include <sys/wait.h>
#include "steps.h"
#include "sys/fault.h"

static bool is_there(const char *path)
{
	struct stat st;

	return !lstat(path, &st);
}

static void put(const char *path, const char *text)
{
	FILE *file = fopen(path, "w");

	CHECK(file && fputs(text, file) >= 0 && !fclose(file));
}

static struct pen_checkpoint_removal *removal;

static void sweep(struct pen_checkpoints *folder)
{
	pen_checkpoint_removal_free(removal);
	OK(pen_checkpoints_sweep(folder, 0, &removal, &kit_err));
}

static void gc(struct pen_checkpoints *folder, uint32_t keep)
{
	pen_checkpoint_removal_free(removal);
	OK(pen_checkpoints_gc(folder, keep, 0, &removal, &kit_err));
}

/* ------------------------------------------------------------------------------- the lock -- */

TEST(a_second_writer_is_told_who_the_first_is)
{
	struct pen_checkpoints *folder = steps_open(in_scratch("c"), PEN_WRITE, 0), *other;
	char pid[32], host[64];
	int status;
	pid_t child;

	gethostname(host, sizeof(host));
	snprintf(pid, sizeof(pid), "process %ld on ", (long)getpid());
	child = fork();
	if (!child) {
		REFUSED(-EBUSY, pen_checkpoints_open(in_scratch("c"), PEN_WRITE, 0, &other,
						     &kit_err));
		CHECK(strstr(kit_err.message, pid) && strstr(kit_err.message, host) &&
		      strstr(kit_err.hint, "Wait for it"));
		_exit(0);
	}
	CHECK(waitpid(child, &status, 0) == child && !status);
	REFUSED(-EBUSY, pen_checkpoints_open(in_scratch("c"), PEN_WRITE, 0, &other, &kit_err));
	CHECK(strstr(kit_err.message, "this process") && strstr(kit_err.hint, "close() the first"));
	/* Readers and other ranks are not concerned. */
	pen_checkpoints_close(steps_open(in_scratch("c"), PEN_READ, 0));
	pen_checkpoints_close(steps_open(in_scratch("c"), PEN_WRITE, 1));
	pen_checkpoints_close(folder);
	pen_checkpoints_close(steps_open(in_scratch("c"), PEN_WRITE, 0));
}

TEST(a_killed_writer_s_lock_is_free_though_its_forked_children_live)
{
	int ready[2], hold[2];
	char byte;
	pid_t writer;

	in_scratch("c");
	CHECK(!pipe(ready) && !pipe(hold));
	writer = fork();
	if (!writer) {
		steps_open(in_scratch("c"), PEN_WRITE, 0);
		if (!fork()) {
			close(hold[1]);
			CHECK_EQ(write(ready[1], "x", 1), 1);
			/* As a worker that loads data: until the test is over. */
			_exit(read(hold[0], &byte, 1) != 0);
		}
		pause();
	}
	CHECK_EQ(read(ready[0], &byte, 1), 1);
	CHECK(!kill(writer, SIGKILL) && waitpid(writer, NULL, 0) == writer);
	pen_checkpoints_close(steps_open(in_scratch("c"), PEN_WRITE, 0));
	close(hold[1]);
}

TEST(a_forked_child_cannot_write_and_does_not_free_the_lock)
{
	struct pen_checkpoints *folder = steps_open(in_scratch("c"), PEN_WRITE, 0), *other;
	const char *path;
	int status;
	pid_t child = fork();

	if (!child) {
		REFUSED(-ECHILD, pen_checkpoints_begin(folder, 1, 1, 0, &path, &kit_err));
		pen_checkpoints_close(folder);
		_exit(0);
	}
	CHECK(waitpid(child, &status, 0) == child && !status);
	REFUSED(-EBUSY, pen_checkpoints_open(in_scratch("c"), PEN_WRITE, 0, &other, &kit_err));
	OK(step_save(folder, 1, 0, 1, &kit_err));
	pen_checkpoints_close(folder);
}

static int no_locks(const char *name)
{
	return !strcmp(name, "flock") ? ENOLCK : 0;
}

TEST(without_locks_it_goes_on_with_a_warning_and_sweeps_nothing)
{
	struct pen_checkpoints *folder;

	sys_fault_hook = no_locks;
	folder = steps_open(in_scratch("c"), PEN_WRITE, 0);
	sys_fault_hook = NULL;
	CHECK(strstr(pen_checkpoints_warning(folder), "no locks"));
	CHECK(!mkdir(in_scratch("c/step-00000001"), 0777));
	sweep(folder);
	CHECK(is_there(in_scratch("c/step-00000001")));
	CHECK_EQ(removal->removed_count, 0);
	CHECK_TEXT(removal->left[0], "step-00000001");
	OK(step_save(folder, 2, 0, 1, &kit_err));
	CHECK_TEXT(steps_told(folder), "unfinished 1, whole 2");
	pen_checkpoints_close(folder);
	pen_checkpoint_removal_free(removal);
}

/* ------------------------------------------------------------------------------ one step -- */

TEST(a_step_exists_with_its_manifest_and_not_before)
{
	struct pen_checkpoints *folder = steps_open(in_scratch("a/b/c"), PEN_WRITE, 0);
	struct pen_checkpoints *reader = steps_open(in_scratch("a/b/c/"), PEN_READ, 0);
	struct pen_checkpoint_file file;
	struct pen_checkpoint *shown;
	const char *path;
	uint64_t step;

	CHECK_TEXT(pen_checkpoints_path(reader), in_scratch("a/b/c"));
	REFUSED(-ENOENT, pen_checkpoints_latest(reader, &step, &kit_err));
	OK(pen_checkpoints_begin(folder, 12, 1, 0, &path, &kit_err));
	OK(step_write(path, 3, &kit_err));
	OK(pen_checkpoints_describe(folder, &file, &kit_err));
	CHECK_TEXT(steps_told(reader), "unfinished 12");
	REFUSED(-ENOENT, pen_checkpoints_show(reader, 12, &shown, &kit_err));
	OK(pen_checkpoints_commit(folder, &file, 1, "{\"lr\": 0.5}", &kit_err));
	OK(pen_checkpoints_latest(reader, &step, &kit_err));
	CHECK_EQ(step, 12);
	OK(pen_checkpoints_show(reader, 12, &shown, &kit_err));
	CHECK_TEXT(shown->user, "{\"lr\": 0.5}");
	CHECK_EQ(shown->files[0].bytes, file.bytes);
	pen_checkpoint_free(shown);
	pen_checkpoints_close(reader);
	pen_checkpoints_close(folder);
}

TEST(a_step_that_exists_is_refused_or_replaced_at_the_commit)
{
	struct pen_checkpoints *folder = steps_open(in_scratch("c"), PEN_WRITE, 0);
	struct pen_checkpoint_checked checked = PEN_CHECKPOINT_CHECKED_INIT;
	struct pen_checkpoint_file file;
	const char *path;

	OK(step_save(folder, 5, 0, 1, &kit_err));
	REFUSED(-EEXIST, pen_checkpoints_begin(folder, 5, 1, 0, &path, &kit_err));
	CHECK(kit_err.hint[0]);
	for (unsigned int turn = 1; turn < 4; turn++) {
		OK(pen_checkpoints_begin(folder, 5, 1, PEN_CHECKPOINT_OVERWRITE, &path, &kit_err));
		OK(step_write(path, turn + 1, &kit_err));
		OK(pen_checkpoints_describe(folder, &file, &kit_err));
		/* The old one is whole until the last moment. */
		OK(pen_checkpoints_verify(folder, 5, NULL, &checked, &kit_err));
		OK(pen_checkpoints_commit(folder, &file, 1, NULL, &kit_err));
		OK(pen_checkpoints_verify(folder, 5, NULL, &checked, &kit_err));
		CHECK_EQ(entries_in(in_scratch("c/step-00000005")), 2);
	}
	CHECK(is_there(in_scratch("c/step-00000005/rank-00000.3.pt")));
	pen_checkpoints_close(folder);
}

TEST(what_is_abandoned_leaves_what_was_there)
{
	struct pen_checkpoints *folder = steps_open(in_scratch("c"), PEN_WRITE, 0);
	const char *path;

	OK(pen_checkpoints_begin(folder, 5, 1, 0, &path, &kit_err));
	OK(step_write(path, 1, &kit_err));
	OK(pen_checkpoints_abandon(folder, &kit_err));
	CHECK(!is_there(in_scratch("c/step-00000005")));
	OK(step_save(folder, 5, 0, 1, &kit_err));
	OK(pen_checkpoints_begin(folder, 5, 1, PEN_CHECKPOINT_OVERWRITE, &path, &kit_err));
	OK(step_write(path, 2, &kit_err));
	/* Closing abandons, too. */
	pen_checkpoints_close(folder);
	folder = steps_open(in_scratch("c"), PEN_WRITE, 0);
	CHECK_EQ(entries_in(in_scratch("c/step-00000005")), 2);
	OK(pen_checkpoints_verify(folder, 5, NULL, NULL, &kit_err));
	REFUSED(-EINVAL, pen_checkpoints_abandon(folder, &kit_err));
	pen_checkpoints_close(folder);
}

TEST(ranks_write_into_what_rank_0_began)
{
	struct pen_checkpoints *ranks[3];
	struct pen_checkpoint_file files[3], wrong;
	const char *path;

	for (uint32_t i = 0; i < 3; i++)
		ranks[i] = steps_open(in_scratch("c"), PEN_WRITE, i);
	REFUSED(-ENOENT, pen_checkpoints_begin(ranks[1], 5, 3, 0, &path, &kit_err));
	CHECK(strstr(kit_err.hint, "Rank 0"));
	for (uint32_t turn = 0; turn < 2; turn++) {
		for (uint32_t i = 0; i < 3; i++) {
			OK(pen_checkpoints_begin(ranks[i], 5, 3, PEN_CHECKPOINT_OVERWRITE, &path,
						 &kit_err));
			OK(step_write(path, i + 10 * turn, &kit_err));
			OK(pen_checkpoints_describe(ranks[i], &files[i], &kit_err));
		}
		REFUSED(-EINVAL, pen_checkpoints_commit(ranks[1], files, 3, NULL, &kit_err));
		REFUSED(-EINVAL, pen_checkpoints_commit(ranks[0], files, 2, NULL, &kit_err));
		wrong = files[1];
		files[1].digest[7] ^= 1;
		REFUSED(-ESTALE, pen_checkpoints_commit(ranks[0], files, 3, NULL, &kit_err));
		files[1] = wrong;
		OK(pen_checkpoints_commit(ranks[0], files, 3, NULL, &kit_err));
		/* Who did not hear of it abandons: nothing of a step that exists is removed. */
		OK(pen_checkpoints_abandon(ranks[1], &kit_err));
		REFUSED(-EINVAL, pen_checkpoints_leave(ranks[0], &kit_err));
		OK(pen_checkpoints_leave(ranks[2], &kit_err));
		REFUSED(-EINVAL, pen_checkpoints_leave(ranks[2], &kit_err));
		OK(pen_checkpoints_verify(ranks[2], 5, NULL, NULL, &kit_err));
		CHECK_EQ(entries_in(in_scratch("c/step-00000005")), 4);
	}
	OK(pen_checkpoints_begin(ranks[0], 6, 3, 0, &path, &kit_err));
	OK(pen_checkpoints_begin(ranks[1], 6, 3, 0, &path, &kit_err));
	OK(step_write(path, 1, &kit_err));
	CHECK(is_there(in_scratch("c/step-00000006/rank-00001.pt")));
	OK(pen_checkpoints_abandon(ranks[1], &kit_err));
	CHECK(!is_there(in_scratch("c/step-00000006/rank-00001.pt")));
	for (uint32_t i = 0; i < 3; i++)
		pen_checkpoints_close(ranks[i]);
}

TEST(a_damaged_step_is_told_apart_and_can_be_overwritten)
{
	struct pen_checkpoints *folder = steps_open(in_scratch("c"), PEN_WRITE, 0);
	struct pen_checkpoint *shown;
	uint64_t step;

	for (uint64_t i = 1; i < 5; i++)
		OK(step_save(folder, i, 0, (unsigned int)i, &kit_err));
	CHECK(!unlink(in_scratch("c/step-00000002/rank-00000.pt")));
	CHECK(!truncate(in_scratch("c/step-00000003/rank-00000.pt"), 5));
	put(in_scratch("c/step-00000004/manifest.json"), "{}");
	CHECK_TEXT(steps_told(folder), "whole 1, damaged 2, damaged 3, damaged 4");
	OK(pen_checkpoints_latest(folder, &step, &kit_err));
	CHECK_EQ(step, 1);
	REFUSED(-EBADMSG, pen_checkpoints_show(folder, 3, &shown, &kit_err));
	CHECK(strstr(kit_err.message, "has 5 bytes"));
	/* A sweep does not touch them: somebody may want to save what can be. */
	sweep(folder);
	CHECK_TEXT(steps_told(folder), "whole 1, damaged 2, damaged 3, damaged 4");
	REFUSED(-EEXIST, step_save(folder, 3, 0, 1, &kit_err));
	OK(step_save(folder, 3, PEN_CHECKPOINT_OVERWRITE, 1, &kit_err));
	CHECK_TEXT(steps_told(folder), "whole 1, damaged 2, whole 3, damaged 4");
	pen_checkpoints_close(folder);
	pen_checkpoint_removal_free(removal);
}

TEST(another_file_in_the_place_of_one_is_found_by_checking_and_verifying)
{
	struct pen_checkpoints *folder = steps_open(in_scratch("c"), PEN_WRITE, 0);

	OK(step_save(folder, 1, 0, 1, &kit_err));
	OK(step_save(folder, 2, 0, 1 + 251 * 256, &kit_err));
	/* A file of the same size that is right in itself. */
	CHECK(!rename(in_scratch("c/step-00000002/rank-00000.pt"),
		      in_scratch("c/step-00000001/rank-00000.pt")));
	OK(pen_checkpoints_verify(folder, 1, NULL, NULL, &kit_err));
	OK(pen_checkpoints_check(folder, 1, 0, &kit_err));
	REFUSED(-EINVAL, pen_checkpoints_check(folder, 1, 1, &kit_err));
	OK(step_save(folder, 3, 0, 2 * 256 + 1, &kit_err));
	CHECK(!rename(in_scratch("c/step-00000003/rank-00000.pt"),
		      in_scratch("c/step-00000001/rank-00000.pt")));
	CHECK_TEXT(steps_told(folder), "whole 1, damaged 2, damaged 3");
	REFUSED(-EILSEQ, pen_checkpoints_verify(folder, 1, NULL, NULL, &kit_err));
	CHECK(strstr(kit_err.object, "step-00000001/rank-00000.pt"));
	REFUSED(-EILSEQ, pen_checkpoints_check(folder, 1, 0, &kit_err));
	CHECK(strstr(kit_err.object, "step-00000001/rank-00000.pt"));
	pen_checkpoints_close(folder);
}

/* ------------------------------------------------------------------------------- removing -- */

TEST(gc_keeps_the_last_whole_steps_and_what_is_not_ours)
{
	struct pen_checkpoints *folder = steps_open(in_scratch("c"), PEN_WRITE, 0);

	for (uint64_t i = 1; i < 7; i++)
		OK(step_save(folder, i, 0, (unsigned int)i, &kit_err));
	CHECK(!truncate(in_scratch("c/step-00000002/rank-00000.pt"), 5));
	CHECK(!truncate(in_scratch("c/step-00000006/rank-00000.pt"), 5));
	put(in_scratch("c/step-00000001/notes.txt"), "mine");
	put(in_scratch("c/step-00000004/notes.txt"), "mine");
	CHECK(!symlink("notes.txt", in_scratch("c/step-00000001/rank-00009.pt")));
	REFUSED(-EINVAL, pen_checkpoints_gc(folder, 0, 0, &removal, &kit_err));
	/* First as a dry run, which must say the same and do nothing. */
	OK(pen_checkpoints_gc(folder, 2, PEN_CHECKPOINT_DRY_RUN, &removal, &kit_err));
	CHECK_EQ(removal->step_count, 3);
	CHECK_EQ(removal->removed_count, 2);
	CHECK_EQ(removal->left_count, 2);
	CHECK_TEXT(steps_told(folder), "whole 1, damaged 2, whole 3, whole 4, whole 5, damaged 6");
	gc(folder, 2);
	CHECK_EQ(removal->step_count, 3);
	CHECK_EQ(removal->steps[1], 2);
	CHECK_EQ(removal->removed_count, 2);
	CHECK_TEXT(removal->removed[0], "step-00000002");
	CHECK_TEXT(removal->removed[1], "step-00000003");
	CHECK_EQ(removal->left_count, 2);
	CHECK(!strncmp(removal->left[0], "step-00000001/", 14));
	CHECK(removal->bytes > 2 * STEP_BYTES);
	CHECK(is_there(in_scratch("c/step-00000001/notes.txt")));
	CHECK_TEXT(steps_told(folder), "unfinished 1, whole 4, whole 5, damaged 6");
	gc(folder, 10);
	CHECK_EQ(removal->step_count, 0);
	gc(folder, 1);
	CHECK_TEXT(steps_told(folder), "unfinished 1, unfinished 4, whole 5, damaged 6");
	pen_checkpoints_close(folder);
	pen_checkpoint_removal_free(removal);
}

TEST(gc_and_sweep_leave_a_step_under_way_alone)
{
	struct pen_checkpoints *folder = steps_open(in_scratch("c"), PEN_WRITE, 0);
	struct pen_checkpoint_file file;
	const char *path;

	for (uint64_t i = 1; i < 4; i++)
		OK(step_save(folder, i, 0, (unsigned int)i, &kit_err));
	OK(pen_checkpoints_begin(folder, 1, 1, PEN_CHECKPOINT_OVERWRITE, &path, &kit_err));
	OK(step_write(path, 7, &kit_err));
	gc(folder, 1);
	sweep(folder);
	CHECK_EQ(removal->removed_count, 0);
	CHECK_TEXT(steps_told(folder), "whole 1, whole 3");
	OK(pen_checkpoints_describe(folder, &file, &kit_err));
	OK(pen_checkpoints_commit(folder, &file, 1, NULL, &kit_err));
	OK(pen_checkpoints_begin(folder, 9, 1, 0, &path, &kit_err));
	OK(step_write(path, 7, &kit_err));
	sweep(folder);
	OK(pen_checkpoints_describe(folder, &file, &kit_err));
	OK(pen_checkpoints_commit(folder, &file, 1, NULL, &kit_err));
	CHECK_TEXT(steps_told(folder), "whole 1, whole 3, whole 9");
	pen_checkpoints_close(folder);
	pen_checkpoint_removal_free(removal);
}

TEST(what_a_crash_left_is_swept_and_nothing_else)
{
	struct pen_checkpoints *folder = steps_open(in_scratch("c"), PEN_WRITE, 0);
	int fd;

	OK(step_save(folder, 1, 0, 1, &kit_err));
	put(in_scratch("c/step-00000001/rank-00000.1.pt"), "of a save that was to replace it");
	put(in_scratch("c/step-00000001/.rank-00000.1.pt.penstock-0123456789abcdef"), "x");
	put(in_scratch("c/step-00000001/notes.txt"), "mine");
	CHECK(!mkdir(in_scratch("c/step-00000002"), 0777));
	put(in_scratch("c/step-00000002/rank-00003.pt"), "x");
	put(in_scratch("c/step-00000002/.manifest.json.penstock-0123456789abcdef"), "x");
	CHECK(!mkdir(in_scratch("c/step-00000003"), 0777));
	put(in_scratch("c/step-00000003/notes.txt"), "mine");
	CHECK(!mkdir(in_scratch("c/step-00000004"), 0777));
	put(in_scratch("c/step-00000004/.rank-00000.pt.penstock-0123456789abcdef"), "x");
	put(in_scratch("c/step-00000005"), "no folder");
	CHECK(!mkdir(in_scratch("c/other"), 0777));
	CHECK(!symlink("other", in_scratch("c/step-00000006")));
	put(in_scratch("c/other/rank-00000.pt"), "x");
	/* Somebody writes this one still. */
	fd = open(in_scratch("c/step-00000004/.rank-00000.pt.penstock-0123456789abcdef"), O_RDWR);
	CHECK(fd >= 0 && !flock(fd, LOCK_EX));
	sweep(folder);
	CHECK_EQ(entries_in(in_scratch("c/step-00000001")), 3);
	CHECK(!is_there(in_scratch("c/step-00000002")));
	CHECK(is_there(in_scratch("c/step-00000003/notes.txt")));
	CHECK_EQ(entries_in(in_scratch("c/step-00000004")), 1);
	CHECK(is_there(in_scratch("c/step-00000005")));
	CHECK(is_there(in_scratch("c/other/rank-00000.pt")));
	CHECK_EQ(removal->removed_count, 3);
	CHECK_EQ(removal->left_count, 3);
	OK(pen_checkpoints_verify(folder, 1, NULL, NULL, &kit_err));
	close(fd);
	sweep(folder);
	CHECK(!is_there(in_scratch("c/step-00000004")));
	pen_checkpoints_close(folder);
	pen_checkpoint_removal_free(removal);
}

TEST(other_ranks_and_readers_remove_nothing)
{
	struct pen_checkpoints *folder = steps_open(in_scratch("c"), PEN_WRITE, 1);

	REFUSED(-EINVAL, pen_checkpoints_gc(folder, 1, 0, &removal, &kit_err));
	REFUSED(-EINVAL, pen_checkpoints_sweep(folder, 0, &removal, &kit_err));
	pen_checkpoints_close(folder);
	folder = steps_open(in_scratch("c"), PEN_READ, 0);
	REFUSED(-EBADF, pen_checkpoints_sweep(folder, 0, &removal, &kit_err));
	pen_checkpoints_close(folder);
}

/* ------------------------------------------------------------------------------ looking -- */

static atomic_bool done;

static void *look(void *path)
{
	struct pen_checkpoints *reader = steps_open(path, PEN_READ, 0);
	struct pen_checkpoint_list *list;
	struct pen_error err;
	uint64_t step;
	int rc;

	while (!done) {
		unsigned int whole = 0;

		OK(pen_checkpoints_list(reader, &list, &kit_err));
		for (size_t i = 0; i < list->count; i++) {
			CHECK(list->steps[i].state != PEN_CHECKPOINT_DAMAGED);
			whole += list->steps[i].state == PEN_CHECKPOINT_WHOLE;
		}
		/* At every moment there is one. */
		CHECK(whole > 0);
		pen_checkpoint_list_free(list);
		OK(pen_checkpoints_latest(reader, &step, &kit_err));
		rc = pen_checkpoints_verify(reader, step, NULL, NULL, &err);
		if (rc && rc != -ENOENT) {
			kit_err = err;
			OK(rc);
		}
	}
	pen_checkpoints_close(reader);
	return NULL;
}

TEST(readers_beside_a_writer_see_a_whole_step_and_never_a_damaged_one)
{
	struct pen_checkpoints *folder = steps_open(in_scratch("c"), PEN_WRITE, 0);
	char path[600];
	pthread_t reader;

	OK(step_save(folder, 0, 0, 0, &kit_err));
	snprintf(path, sizeof(path), "%s", in_scratch("c"));
	CHECK(!pthread_create(&reader, NULL, look, path));
	for (unsigned int i = 1; i < (TEST_SLOW_BUILD ? 30 : 120); i++) {
		OK(step_save(folder, i, 0, i, &kit_err));
		OK(step_save(folder, i, PEN_CHECKPOINT_OVERWRITE, i + 1, &kit_err));
		gc(folder, 1);
		CHECK_EQ(removal->step_count, 1);
	}
	done = true;
	CHECK(!pthread_join(reader, NULL));
	pen_checkpoints_close(folder);
	pen_checkpoint_removal_free(removal);
}

static int read_only(const char *name)
{
	static const char *const writes[] = { "mkdir", "fsync", "unlink", "rmdir", "flock",
					      "linkat", "pwrite", "ftruncate" };

	for (size_t i = 0; i < COUNT(writes); i++)
		if (!strcmp(name, writes[i])) {
			fprintf(stderr, "a reader calls %s\n", name);
			exit(1);
		}
	return 0;
}

TEST(looking_changes_nothing_and_works_where_nothing_may_be_written)
{
	struct pen_checkpoints *folder = steps_open(in_scratch("c"), PEN_WRITE, 0);
	struct pen_checkpoint *shown;

	OK(step_save(folder, 1, 0, 1, &kit_err));
	pen_checkpoints_close(folder);
	CHECK(!unlink(in_scratch("c/.penstock.lock")) && !chmod(in_scratch("c"), 0555));
	sys_fault_hook = read_only;
	folder = steps_open(in_scratch("c"), PEN_READ, 0);
	CHECK_TEXT(steps_told(folder), "whole 1");
	OK(pen_checkpoints_show(folder, 1, &shown, &kit_err));
	pen_checkpoint_free(shown);
	pen_checkpoints_close(folder);
	sys_fault_hook = NULL;
	CHECK(!is_there(in_scratch("c/.penstock.lock")));
	CHECK(!chmod(in_scratch("c"), 0755));
}

static int fail_fsync(const char *name)
{
	return !strcmp(name, "fsync") ? EIO : 0;
}

TEST(a_commit_whose_flush_failed_is_not_tried_again)
{
	struct pen_checkpoints *folder = steps_open(in_scratch("c"), PEN_WRITE, 0);
	struct pen_checkpoint_file file;
	const char *path;

	OK(pen_checkpoints_begin(folder, 1, 1, 0, &path, &kit_err));
	OK(step_write(path, 1, &kit_err));
	OK(pen_checkpoints_describe(folder, &file, &kit_err));
	sys_fault_hook = fail_fsync;
	REFUSED(-EIO, pen_checkpoints_commit(folder, &file, 1, NULL, &kit_err));
	sys_fault_hook = NULL;
	REFUSED(-EIO, pen_checkpoints_commit(folder, &file, 1, NULL, &kit_err));
	OK(pen_checkpoints_abandon(folder, &kit_err));
	OK(step_save(folder, 1, 0, 1, &kit_err));
	CHECK_TEXT(steps_told(folder), "whole 1");
	pen_checkpoints_close(folder);
}

TEST(wrong_calls_are_refused_in_words)
{
	struct pen_checkpoints *folder;
	struct pen_checkpoint_file file;
	const char *path;

	REFUSED(-ENOENT, pen_checkpoints_open(in_scratch("x"), PEN_READ, 0, &folder, &kit_err));
	REFUSED(-EINVAL, pen_checkpoints_open(in_scratch("x"), PEN_WRITE_IN_PLACE, 0, &folder,
					      &kit_err));
	REFUSED(-EINVAL, pen_checkpoints_open(in_scratch("x"), PEN_WRITE, 100000, &folder,
					      &kit_err));
	folder = steps_open(in_scratch("c"), PEN_WRITE, 0);
	REFUSED(-EINVAL, pen_checkpoints_describe(folder, &file, &kit_err));
	REFUSED(-EINVAL, pen_checkpoints_begin(folder, UINT64_MAX, 1, 0, &path, &kit_err));
	REFUSED(-EINVAL, pen_checkpoints_begin(folder, 1, 0, 0, &path, &kit_err));
	REFUSED(-EINVAL, pen_checkpoints_begin(folder, 1, 1, 8, &path, &kit_err));
	OK(pen_checkpoints_begin(folder, 1, 1, 0, &path, &kit_err));
	REFUSED(-EALREADY, pen_checkpoints_begin(folder, 2, 1, 0, &path, &kit_err));
	REFUSED(-ENOENT, pen_checkpoints_describe(folder, &file, &kit_err));
	OK(step_write(path, 1, &kit_err));
	OK(pen_checkpoints_describe(folder, &file, &kit_err));
	REFUSED(-EINVAL, pen_checkpoints_commit(folder, &file, 1, "{\"a\": NaN}", &kit_err));
	OK(pen_checkpoints_commit(folder, &file, 1, "{}", &kit_err));
	pen_checkpoints_close(folder);
	pen_checkpoints_close(NULL);
}

TEST_MAIN
