/* SPDX-License-Identifier: MIT */
/*
 * Files as objects. What is written shows only at commit, whole, under the old mode and owner;
 * without a commit it leaves no trace. What is read is told apart from what it was at open.
 */
#include <sched.h>
#include <sys/file.h>
#include <sys/mount.h>
#include <sys/resource.h>
#include <sys/xattr.h>
#include "io/object.h"
#include "scratch.h"
#include "sys/fault.h"
#include "sys/os.h"

static struct pen_object *object;
static struct pen_error err;

static int open_object(const char *path, enum pen_mode mode, uint64_t size)
{
	return pen_object_open(path, mode, size, &object, &err);
}

static void fill_object(uint64_t size)
{
	static unsigned char bytes[1 << 20];

	CHECK(size <= sizeof(bytes));
	pattern_fill(bytes, size, 0);
	CHECK_EQ(pwrite(object->fd, bytes, size, 0), size);
}

static void close_object(void)
{
	pen_object_close(object);
	object = NULL;
}

/* Give the target new bytes of the pattern and commit them. */
static void replace(const char *path, uint64_t size)
{
	CHECK_EQ(open_object(path, PEN_WRITE, size), 0);
	fill_object(size);
	CHECK_EQ(pen_object_commit(object, &err), 0);
	close_object();
}

static const char *failing;

static int fail_named(const char *name)
{
	return !strcmp(name, failing) ? EIO : 0;
}

TEST(nothing_is_visible_before_commit)
{
	const char *path = in_scratch("new");

	CHECK_EQ(open_object(path, PEN_WRITE, 10000), 0);
	CHECK_EQ(pen_object_size(object), 10000);
	fill_object(10000);
	CHECK(access(path, F_OK) < 0);
	CHECK_EQ(pen_object_commit(object, &err), 0);
	CHECK_EQ(good_bytes(path), 10000);
	CHECK_EQ(entries_in(scratch), 1);
	close_object();
	CHECK_EQ(good_bytes(path), 10000);
	CHECK_EQ(entries_in(scratch), 1);
}

TEST(the_old_file_stays_until_commit)
{
	const char *path = make_file("old", 5000);

	CHECK_EQ(open_object(path, PEN_WRITE, 7000), 0);
	fill_object(104);
	CHECK_EQ(good_bytes(path), 5000);
	CHECK_EQ(pen_object_commit(object, &err), 0);
	close_object();
	CHECK_EQ(good_bytes(path), 104);
}

TEST(close_without_commit_leaves_no_trace)
{
	const char *path = make_file("old", 5000);

	CHECK_EQ(open_object(path, PEN_WRITE, 7000), 0);
	fill_object(7000);
	close_object();
	CHECK_EQ(good_bytes(path), 5000);
	CHECK_EQ(open_object(in_scratch("new"), PEN_WRITE, 7000), 0);
	close_object();
	CHECK_EQ(open_object(in_scratch("new"), PEN_WRITE_IN_PLACE, 7000), 0);
	close_object();
	CHECK_EQ(entries_in(scratch), 1);
}

static int fail_tmpfile(const char *name)
{
	return !strcmp(name, "O_TMPFILE") ? EOPNOTSUPP : 0;
}

TEST(without_unnamed_files_it_is_the_same)
{
	const char *path = in_scratch("new");

	for (int commit = 0; commit < 2; commit++) {
		sys_fault_hook = fail_tmpfile;
		CHECK_EQ(open_object(path, PEN_WRITE, 7000), 0);
		sys_fault_hook = NULL;
		fill_object(7000);
		CHECK(access(path, F_OK) < 0);
		CHECK_EQ(entries_in(scratch), 1);
		if (commit)
			CHECK_EQ(pen_object_commit(object, &err), 0);
		close_object();
		CHECK_EQ(entries_in(scratch), commit);
	}
}

TEST(a_replaced_file_keeps_its_mode)
{
	const char *path = make_file("old", 10);
	struct stat st;

	CHECK(!chmod(path, 0640));
	replace(path, 20);
	CHECK(!stat(path, &st));
	CHECK_EQ(st.st_mode & 07777, 0640);
	CHECK(!chmod(path, 06755));
	replace(path, 30);
	CHECK(!stat(path, &st));
	CHECK_EQ(st.st_mode & 07777, 06755);
}

TEST(a_new_file_has_the_mode_of_the_umask)
{
	struct stat st;

	umask(027);
	replace(in_scratch("new"), 10);
	CHECK(!stat(in_scratch("new"), &st));
	CHECK_EQ(st.st_mode & 07777, 0640);
}

TEST(a_replaced_file_keeps_its_owner)
{
	const char *path = make_file("old", 10);
	struct stat st;

	if (geteuid())
		SKIP("only root can give files away");
	CHECK(!chown(path, 1234, 2345));
	CHECK(!chmod(path, 04711));
	replace(path, 20);
	CHECK(!stat(path, &st));
	CHECK_EQ(st.st_uid, 1234);
	CHECK_EQ(st.st_gid, 2345);
	CHECK_EQ(st.st_mode & 07777, 04711);
}

/* An access list, as the kernel has it: owner rw-, user 1234 r--, group as said, others none. */
struct access_list {
	uint32_t version;
	struct {
		uint16_t tag, rights;
		uint32_t id;
	} entries[5];
};

static struct access_list access_list(uint16_t named, uint16_t mask)
{
	return (struct access_list){ 2, { { 1, 6, UINT32_MAX }, { 2, named, 1234 },
					  { 4, 0, UINT32_MAX }, { 16, mask, UINT32_MAX },
					  { 32, 0, UINT32_MAX } } };
}

static void set_access_list(const char *path, const char *kind, uint16_t named, uint16_t mask)
{
	struct access_list list = access_list(named, mask);

	if (setxattr(path, kind, &list, sizeof(list), 0))
		SKIP("no access lists here");
}

static bool has_access_list(const char *path, uint16_t named, uint16_t mask)
{
	struct access_list list = access_list(named, mask), found;

	return getxattr(path, "system.posix_acl_access", &found, sizeof(found)) ==
		       sizeof(found) &&
	       !memcmp(&list, &found, sizeof(list));
}

static unsigned int mode_of(const char *path)
{
	struct stat st;

	CHECK(!lstat(path, &st));
	return st.st_mode & 07777;
}

TEST(a_replaced_file_keeps_its_access_list_and_attributes)
{
	const char *path = make_file("old", 10);
	char value[8];

	set_access_list(path, "system.posix_acl_access", 4, 4);
	CHECK(!setxattr(path, "user.of", "old", 3, 0));
	CHECK(geteuid() || !setxattr(path, "trusted.of", "root", 4, 0));
	replace(path, 20);
	CHECK(has_access_list(path, 4, 4));
	CHECK_EQ(mode_of(path), 0640);
	CHECK_EQ(getxattr(path, "user.of", value, sizeof(value)), 3);
	CHECK(!memcmp(value, "old", 3));
	CHECK(geteuid() || getxattr(path, "trusted.of", value, sizeof(value)) == 4);
}

TEST(a_replaced_file_is_not_opened_to_whom_its_lost_access_list_kept_out)
{
	const char *path = make_file("old", 10);
	static const char *const calls[] = { "fsetxattr", "fgetxattr" };

	for (size_t i = 0; i < 2; i++) {
		set_access_list(path, "system.posix_acl_access", 0, 6);
		CHECK_EQ(mode_of(path), 0660);
		CHECK_EQ(open_object(path, PEN_WRITE, 10), 0);
		failing = calls[i];
		sys_fault_hook = fail_named;
		CHECK_EQ(pen_object_commit(object, &err), 0);
		sys_fault_hook = NULL;
		close_object();
		CHECK_EQ(mode_of(path), 0600);
	}
}

static void check_listed_folder(void)
{
	int fd = open(in_scratch("listed/plain"), O_CREAT | O_RDWR | O_CLOEXEC, 0666);

	CHECK(fd >= 0 && !close(fd));
	CHECK(has_access_list(in_scratch("listed/plain"), 4, 6));
	replace(in_scratch("listed/new"), 20);
	CHECK(has_access_list(in_scratch("listed/new"), 4, 6));
	CHECK_EQ(mode_of(in_scratch("listed/new")), mode_of(in_scratch("listed/plain")));
	CHECK(!unlink(in_scratch("listed/new")));
	/* One that has no list of its own gets none by being replaced. */
	CHECK(!removexattr(in_scratch("listed/plain"), "system.posix_acl_access"));
	CHECK(!chmod(in_scratch("listed/plain"), 0640));
	replace(in_scratch("listed/plain"), 20);
	CHECK(getxattr(in_scratch("listed/plain"), "system.posix_acl_access", NULL, 0) < 0);
	CHECK_EQ(mode_of(in_scratch("listed/plain")), 0640);
	CHECK(!unlink(in_scratch("listed/plain")));
}

TEST(a_new_file_has_the_rights_that_its_directory_gives)
{
	CHECK(!mkdir(in_scratch("listed"), 0755));
	set_access_list(in_scratch("listed"), "system.posix_acl_default", 4, 7);
	check_listed_folder();
	sys_fault_hook = fail_tmpfile;
	check_listed_folder();
}

/* The only file in the scratch directory whose name begins with a dot; "" without one. */
static int find_hidden(const char *name, void *context)
{
	if (name[0] == '.')
		strcpy(context, name);
	return 0;
}

static const char *hidden_file(void)
{
	char name[NAME_MAX + 1] = "";

	CHECK_EQ(os_list(AT_FDCWD, scratch, find_hidden, name), 0);
	CHECK(name[0]);
	return in_scratch(name);
}

static void check_hidden(const char *path, unsigned int wanted, bool by_need)
{
	if (!by_need)
		sys_fault_hook = fail_tmpfile;
	CHECK_EQ(open_object(path, PEN_WRITE, 100), 0);
	sys_fault_hook = NULL;
	if (by_need)
		CHECK_EQ(object_need_name(object, &err), 0);
	fill_object(100);
	CHECK_EQ(mode_of(hidden_file()), 0600);
	CHECK_EQ(pen_object_commit(object, &err), 0);
	close_object();
	CHECK_EQ(mode_of(path), wanted);
	CHECK_EQ(entries_in(scratch), 1);
}

TEST(a_file_with_a_temporary_name_is_its_owners_alone)
{
	const char *path = in_scratch("file");

	umask(002);
	for (int by_need = 0; by_need < 2; by_need++) {
		check_hidden(path, 0664, by_need);
		CHECK(!chmod(path, 0640));
		check_hidden(path, 0640, by_need);
		CHECK(!chmod(path, 0600));
		check_hidden(path, 0600, by_need);
		CHECK(!unlink(path));
	}
}

static const char *flushed_target;
static unsigned int hidden_mode;

static int narrow_while_it_flushes(const char *name)
{
	if (!strcmp(name, "fdatasync")) {
		hidden_mode = mode_of(hidden_file());
		CHECK(!chmod(flushed_target, 0600));
	}
	return 0;
}

TEST(rights_that_become_narrower_while_a_commit_flushes_stay_so)
{
	flushed_target = make_file("old", 10);
	for (int by_need = 0; by_need < 2; by_need++) {
		CHECK(!chmod(flushed_target, 0664));
		sys_fault_hook = by_need ? NULL : fail_tmpfile;
		CHECK_EQ(open_object(flushed_target, PEN_WRITE, 100), 0);
		sys_fault_hook = NULL;
		CHECK_EQ(by_need ? object_need_name(object, &err) : 0, 0);
		fill_object(100);
		sys_fault_hook = narrow_while_it_flushes;
		CHECK_EQ(pen_object_commit(object, &err), 0);
		sys_fault_hook = NULL;
		close_object();
		CHECK_EQ(hidden_mode, 0600);
		CHECK_EQ(mode_of(flushed_target), 0600);
	}
}

TEST(rights_that_belong_to_another_owner_are_not_inherited)
{
	const char *path = make_file("old", 10);

	if (geteuid())
		SKIP("only root can give files away");
	CHECK(!chown(path, 1234, 2345) && !chmod(path, 06676) && !chmod(scratch, 0777));
	CHECK(!setegid(65534) && !seteuid(65534));
	replace(path, 20);
	CHECK(!seteuid(0) && !setegid(0));
	CHECK_EQ(mode_of(path), 0666);
}

static unsigned int mode_after_another_replaced(const char *path)
{
	CHECK(!setegid(65534) && !seteuid(65534));
	replace(path, 20);
	CHECK(!seteuid(0) && !setegid(0));
	return mode_of(path);
}

TEST(whom_a_lost_group_kept_out_stays_out)
{
	static const uint16_t cases[][2] = { { 0, 6 }, { 6, 0 }, { 4, 6 } };
	const char *path = make_file("old", 10);

	if (geteuid())
		SKIP("only root can give files away");
	CHECK(!chown(path, 0, 2345) && !chmod(path, 0606) && !chmod(scratch, 0777));
	CHECK_EQ(mode_after_another_replaced(path), 0600);
	for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
		struct access_list list = access_list(4, cases[i][1]);

		list.entries[2].rights = cases[i][0];
		list.entries[4].rights = 6;
		CHECK(!chown(path, 0, 2345));
		if (setxattr(path, "system.posix_acl_access", &list, sizeof(list), 0))
			SKIP("no access lists here");
		CHECK_EQ(mode_after_another_replaced(path) & 7, cases[i][0] & cases[i][1]);
	}
}

TEST(a_link_stays_a_link_and_its_file_changes)
{
	const char *path = make_file("old", 10);
	struct stat st;

	CHECK(!mkdir(in_scratch("sub"), 0755));
	CHECK(!symlink("../old", in_scratch("sub/link")));
	replace(in_scratch("sub/link"), 500);
	CHECK(!lstat(in_scratch("sub/link"), &st) && S_ISLNK(st.st_mode));
	CHECK_EQ(good_bytes(path), 500);
	CHECK_EQ(entries_in(in_scratch("sub")), 1);
}

TEST(a_link_to_nothing_is_followed_too)
{
	struct stat st;

	CHECK(!symlink("not-yet", in_scratch("link")));
	replace(in_scratch("link"), 500);
	CHECK(!lstat(in_scratch("link"), &st) && S_ISLNK(st.st_mode));
	CHECK_EQ(good_bytes(in_scratch("not-yet")), 500);
}

TEST(names_without_a_directory_and_long_names_work)
{
	char name[251];

	in_scratch("");
	CHECK(!chdir(scratch));
	replace("plain", 100);
	CHECK_EQ(good_bytes("plain"), 100);
	memset(name, 'n', 250);
	name[250] = 0;
	replace(name, 100);
	CHECK_EQ(good_bytes(name), 100);
	CHECK(!chdir("/"));
}

static int cachestat_error;

static int fail_cachestat(const char *name)
{
	return !strcmp(name, "cachestat") ? cachestat_error : 0;
}

static void go_to(const char *folder)
{
	CHECK(!mkdir(in_scratch(folder), 0755) || errno == EEXIST);
	CHECK(!chdir(in_scratch(folder)));
}

TEST(a_name_leads_where_it_led_at_open_wherever_the_process_goes)
{
	in_scratch("");
	go_to("a");
	CHECK_EQ(open_object("out", PEN_WRITE, 100), 0);
	fill_object(100);
	go_to("b");
	CHECK_EQ(pen_object_commit(object, &err), 0);
	close_object();
	CHECK_EQ(good_bytes(in_scratch("a/out")), 100);
	CHECK_EQ(entries_in(in_scratch("b")), 0);
	/* A directory that is moved takes its files along. */
	go_to("a");
	CHECK_EQ(open_object("../a/out", PEN_WRITE, 200), 0);
	fill_object(200);
	CHECK(!rename(in_scratch("a"), in_scratch("c")) && !mkdir(in_scratch("a"), 0755));
	CHECK_EQ(pen_object_commit(object, &err), 0);
	close_object();
	CHECK_EQ(good_bytes(in_scratch("c/out")), 200);
	CHECK_EQ(entries_in(in_scratch("a")), 0);
	/* One that is created in place and never committed goes, and none of the same name. */
	go_to("a");
	CHECK_EQ(open_object("new", PEN_WRITE_IN_PLACE, 10), 0);
	go_to("b");
	make_file("b/new", 10);
	close_object();
	CHECK_EQ(entries_in(in_scratch("a")), 0);
	CHECK_EQ(entries_in(in_scratch("b")), 1);
	CHECK(!chdir("/"));
}

TEST(a_file_that_is_read_keeps_its_name_wherever_the_process_goes)
{
	in_scratch("");
	go_to("b");
	make_file("b/in", 10);
	go_to("a");
	make_file("a/in", 5000);
	CHECK_EQ(open_object("in", PEN_READ, 0), 0);
	object->keeps_name = true;
	go_to("b");
	CHECK_EQ(object_unchanged(object, &err), 0);
	CHECK(!rename(in_scratch("b/in"), in_scratch("a/in")));
	CHECK_EQ(object_unchanged(object, &err), -ESTALE);
	CHECK(strstr(err.message, "took its name"));
	close_object();
	CHECK(!chdir("/"));
}

TEST(links_that_lead_round_in_a_circle_are_refused)
{
	CHECK(!symlink("two", in_scratch("one")) && !symlink("one", in_scratch("two")));
	CHECK_EQ(open_object(in_scratch("one"), PEN_WRITE, 10), -ELOOP);
	CHECK(err.hint[0]);
}

TEST(links_to_directories_and_of_proc_are_followed)
{
	char self[64];
	int fd;

	CHECK(!mkdir(in_scratch("real"), 0755) && !symlink("real/", in_scratch("folder")));
	CHECK(!symlink("folder/../folder/file", in_scratch("link")));
	replace(in_scratch("link"), 100);
	replace(in_scratch("link"), 200);
	CHECK_EQ(good_bytes(in_scratch("real/file")), 200);
	CHECK_EQ(entries_in(in_scratch("real")), 1);
	CHECK_EQ(open_object(in_scratch("folder"), PEN_WRITE, 10), -EISDIR);
	fd = open(in_scratch("real/file"), O_RDONLY | O_CLOEXEC);
	CHECK(fd >= 0);
	snprintf(self, sizeof(self), "/proc/self/fd/%d", fd);
	if (access(self, F_OK))
		SKIP("there is no /proc");
	replace(self, 300);
	CHECK_EQ(good_bytes(in_scratch("real/file")), 300);
	/* The one that the link leads to is gone now: there is nothing to replace. */
	CHECK_EQ(open_object(self, PEN_WRITE, 10), -ENOENT);
	CHECK(strstr(err.message, "by a name of its own") && err.hint[0]);
	CHECK_EQ(entries_in(in_scratch("real")), 1);
	close(fd);
}

/* Whatever commit needs was had at open: it cannot fail after the target was replaced. */
TEST(a_commit_opens_nothing_to_flush_the_directory)
{
	const char *path = make_file("old", 10);
	struct rlimit limit, tight;

	CHECK(!getrlimit(RLIMIT_NOFILE, &limit));
	CHECK_EQ(open_object(path, PEN_WRITE, 100), 0);
	fill_object(100);
	CHECK(!unlink(path));
	tight = limit;
	tight.rlim_cur = 3;
	CHECK(!setrlimit(RLIMIT_NOFILE, &tight));
	CHECK_EQ(pen_object_commit(object, &err), 0);
	CHECK(!setrlimit(RLIMIT_NOFILE, &limit));
	close_object();
	CHECK_EQ(good_bytes(path), 100);
}

TEST(a_directory_that_must_not_be_read_is_written_to)
{
	bool flushed = true;

	CHECK(!mkdir(in_scratch("blind"), 0777) && !chmod(in_scratch("blind"), 0333));
	CHECK(!chmod(scratch, 0755));
	if (!geteuid() && seteuid(65534))
		SKIP("root may read everywhere, and cannot become someone else");
	for (int i = 1; i < 3; i++)
		replace(in_scratch("blind/file"), 100u * (unsigned int)i);
	CHECK_EQ(good_bytes(in_scratch("blind/file")), 200);
	CHECK_EQ(open_object(in_scratch("blind/file"), PEN_WRITE, 10), 0);
	failing = "syncfs";
	sys_fault_hook = fail_named;
	flushed = !pen_object_commit(object, &err);
	sys_fault_hook = NULL;
	CHECK(!flushed && strstr(err.hint, "power loss"));
	CHECK_EQ(pen_object_commit(object, &err), 0);
	close_object();
	CHECK(!getuid() ? !seteuid(0) : 1);
}

static void be_without_proc(void)
{
	if (geteuid() || unshare(CLONE_NEWNS))
		SKIP("only root can hide /proc from itself");
	if (mount("none", "/", NULL, MS_REC | MS_PRIVATE, NULL) ||
	    mount("none", "/proc", "tmpfs", 0, NULL))
		SKIP("/proc cannot be hidden here");
	CHECK(access("/proc/self", F_OK) < 0);
}

TEST(without_proc_files_are_written_and_read_all_the_same)
{
	const char *path = in_scratch("file");
	bool direct;

	CHECK_EQ(open_object(make_file("probe", 10), PEN_READ, 0), 0);
	direct = object->direct_fd >= 0;
	close_object();
	be_without_proc();
	for (int i = 1; i < 3; i++)
		replace(path, 100u * (unsigned int)i);
	CHECK_EQ(good_bytes(path), 200);
	cachestat_error = EPERM;
	sys_fault_hook = fail_cachestat;
	CHECK_EQ(open_object(path, PEN_READ, 0), 0);
	sys_fault_hook = NULL;
	CHECK_EQ(object->direct_fd >= 0, direct);
	CHECK_TEXT(object_residency_method(object), "samples");
	close_object();
	CHECK_EQ(entries_in(scratch), 2);
	/* The leak checker wants it back. */
	CHECK(!umount("/proc"));
}

static int fail_naming(const char *name)
{
	return !strncmp(name, "linkat", 6) || !strcmp(name, "reopen") ? ENOENT : 0;
}

/* As an ordinary user finds it on older kernels without /proc. */
TEST(a_file_that_could_not_be_named_later_has_a_name_from_the_start)
{
	const char *path = in_scratch("file");

	for (int i = 1; i < 3; i++) {
		sys_fault_hook = fail_naming;
		replace(path, 100u * (unsigned int)i);
		CHECK_EQ(good_bytes(path), 100 * i);
		CHECK_EQ(open_object(path, PEN_WRITE, 7000), 0);
		CHECK_EQ(entries_in(scratch), 2);
		close_object();
		CHECK_EQ(entries_in(scratch), 1);
		sys_fault_hook = NULL;
	}
}

/* ----------------------------------------------------------------------- temporary names -- */

TEST(a_name_that_is_taken_does_not_block_a_save)
{
	const char *path;
	char name[80];

	for (int i = 0; i < 20; i++) {
		snprintf(name, sizeof(name), ".out.penstock-%d-%d", getpid(), i);
		make_file(name, 1);
	}
	path = make_file("out", 10);
	replace(path, 100);
	sys_fault_hook = fail_tmpfile;
	replace(path, 200);
	sys_fault_hook = NULL;
	CHECK_EQ(good_bytes(path), 200);
}

static int links, renames;

static int take_some_names(const char *name)
{
	renames += !strcmp(name, "rename");
	return !strcmp(name, "linkat") && links++ > 0 && links < 5 ? EEXIST : 0;
}

TEST(another_name_is_tried_where_one_is_taken)
{
	const char *path = make_file("out", 10);

	sys_fault_hook = take_some_names;
	replace(path, 100);
	sys_fault_hook = NULL;
	CHECK_EQ(links, 5);
	CHECK_EQ(good_bytes(path), 100);
	CHECK_EQ(entries_in(scratch), 1);
}

TEST(a_new_file_has_no_other_name_on_its_way)
{
	links = -100;
	sys_fault_hook = take_some_names;
	replace(in_scratch("out"), 100);
	sys_fault_hook = NULL;
	CHECK_EQ(renames, 0);
	CHECK_EQ(good_bytes(in_scratch("out")), 100);
}

/* The first naming is the trial at open, the second the one that counts. */
static int be_faster(const char *name)
{
	if (!strcmp(name, "linkat") && ++links == 2)
		CHECK(!chmod(make_file("out", 10), 0600));
	return 0;
}

TEST(a_file_that_appears_meanwhile_is_replaced_and_its_rights_kept)
{
	sys_fault_hook = be_faster;
	replace(in_scratch("out"), 100);
	sys_fault_hook = NULL;
	CHECK_EQ(good_bytes(in_scratch("out")), 100);
	CHECK_EQ(mode_of(in_scratch("out")), 0600);
	CHECK_EQ(entries_in(scratch), 1);
}

static int looks;

/* What another writer does between the first look at the target and the second. */
static int replace_before_the_look(const char *name)
{
	if (!strcmp(name, "lstat") && ++looks <= 3)
		CHECK(!rename(make_file("other", 10), in_scratch("out")));
	return 0;
}

TEST(a_target_that_another_writer_replaces_while_it_is_looked_for_is_replaced)
{
	make_file("out", 10);
	sys_fault_hook = replace_before_the_look;
	CHECK_EQ(open_object(in_scratch("out"), PEN_WRITE, 100), 0);
	sys_fault_hook = NULL;
	CHECK_EQ(looks, 4);
	fill_object(100);
	CHECK_EQ(pen_object_commit(object, &err), 0);
	close_object();
	CHECK_EQ(good_bytes(in_scratch("out")), 100);
}

TEST(what_killed_writers_left_is_removed_by_the_next_one)
{
	make_file(".some.penstock-0123456789abcdef", 10);
	make_file(".a.penstock-b.penstock-0123456789abcdef", 10);
	CHECK_EQ(open_object(in_scratch("out"), PEN_WRITE, 10), 0);
	CHECK_EQ(entries_in(scratch), 0);
	close_object();
}

TEST(nothing_else_is_removed)
{
	static const char *const names[] = {
		"some.penstock-0123456789abcdef", ".penstock-0123456789abcdef",
		"..penstock-0123456789abcdef",
		".some.penstock-0123456789abcde", ".some.penstock-0123456789abcdef0",
		".some.penstock-0123456789ABCDEF", ".some.penstock-0123456789abcdef~",
		".some.penstock-1", ".some.penstock-1-", ".some.penstock--1",
		".some.penstock-1-1", ".some.penstock-1-1-1",
		".some-0123456789abcdef", ".some.penstock_0123456789abcdef",
	};
	const size_t count = sizeof(names) / sizeof(names[0]);
	int fd;

	for (size_t i = 0; i < count; i++)
		make_file(names[i], 10);
	CHECK(!symlink(names[0], in_scratch(".link.penstock-0123456789abcdef")));
	CHECK(!mkdir(in_scratch(".folder.penstock-0123456789abcdef"), 0755));
	CHECK(!mkfifo(in_scratch(".pipe.penstock-0123456789abcdef"), 0644));
	fd = open(make_file(".live.penstock-0123456789abcdef", 10), O_RDONLY | O_CLOEXEC);
	CHECK(fd >= 0 && !flock(fd, LOCK_EX));
	replace(in_scratch("out"), 10);
	CHECK_EQ(entries_in(scratch), count + 5);
	close(fd);
	replace(in_scratch("out"), 10);
	CHECK_EQ(entries_in(scratch), count + 4);
}

TEST(writers_leave_each_other_alone)
{
	struct pen_object *first;

	for (int by_need = 0; by_need < 2; by_need++) {
		sys_fault_hook = by_need ? NULL : fail_tmpfile;
		CHECK_EQ(open_object(in_scratch("first"), PEN_WRITE, 100), 0);
		sys_fault_hook = NULL;
		CHECK_EQ(by_need ? object_need_name(object, &err) : 0, 0);
		fill_object(100);
		first = object;
		replace(in_scratch("second"), 50);
		CHECK_EQ(pen_object_commit(first, &err), 0);
		pen_object_close(first);
		CHECK_EQ(good_bytes(in_scratch("first")), 100);
		CHECK_EQ(entries_in(scratch), 2);
	}
}

static int locks, holder = -1;

/* What a sweep does that comes between a file's creation and its lock: remove it ... */
static int sweep_before_the_lock(const char *name)
{
	if (!strcmp(name, "flock") && ++locks == 2)
		CHECK(!unlink(hidden_file()));
	return fail_tmpfile(name);
}

/* ... or be about to. The first lock is that of the file by which the mode is found out. */
static int lock_before(const char *name)
{
	if (!strcmp(name, "flock") && ++locks == 2) {
		holder = open(hidden_file(), O_RDONLY | O_CLOEXEC);
		CHECK(holder >= 0 && !flock(holder, LOCK_EX));
	}
	return fail_tmpfile(name);
}

TEST(a_writer_whose_file_is_swept_before_it_is_locked_takes_another)
{
	static int (*const hooks[])(const char *name) = { sweep_before_the_lock, lock_before };

	for (int i = 0; i < 2; i++) {
		locks = 0;
		sys_fault_hook = hooks[i];
		CHECK_EQ(open_object(in_scratch("out"), PEN_WRITE, 100), 0);
		CHECK_EQ(locks, 3);
		sys_fault_hook = NULL;
		fill_object(100);
		CHECK_EQ(entries_in(scratch), i + 1);
		CHECK_EQ(pen_object_commit(object, &err), 0);
		close_object();
		CHECK_EQ(good_bytes(in_scratch("out")), 100);
		CHECK_EQ(entries_in(scratch), 1);
	}
	close(holder);
}

TEST(a_sweep_that_fails_does_not_fail_the_save)
{
	static const char *const calls[] = { "fdopendir", "readdir", "unlink", "fstatfs" };

	for (size_t i = 0; i < sizeof(calls) / sizeof(calls[0]); i++) {
		make_file(".some.penstock-0123456789abcdef", 10);
		failing = calls[i];
		sys_fault_hook = fail_named;
		replace(in_scratch("out"), 100);
		sys_fault_hook = NULL;
		CHECK_EQ(entries_in(scratch), 2);
	}
	replace(in_scratch("out"), 100);
	CHECK_EQ(entries_in(scratch), 1);
}

TEST(what_is_in_place_is_not_locked)
{
	const char *path = make_file("out", 10);
	int fd;

	CHECK_EQ(open_object(path, PEN_WRITE, 100), 0);
	CHECK_EQ(pen_object_commit(object, &err), 0);
	fd = open(path, O_RDONLY | O_CLOEXEC);
	CHECK(fd >= 0 && !flock(fd, LOCK_EX | LOCK_NB));
	close(fd);
	close_object();
}

TEST(in_place_overwrites_the_file_itself)
{
	const char *path = make_file("old", 5000);
	struct stat before, after;

	CHECK(!stat(path, &before));
	CHECK_EQ(open_object(path, PEN_WRITE_IN_PLACE, 3000), 0);
	CHECK_EQ(pwrite(object->fd, "x", 1, 2000), 1);
	CHECK_EQ(good_bytes(path), 2000);
	CHECK_EQ(pen_object_commit(object, &err), 0);
	close_object();
	CHECK(!stat(path, &after));
	CHECK_EQ(before.st_ino, after.st_ino);
	CHECK_EQ(after.st_size, 5000);
	/* One that must grow grows; one that is absent is made, and stays once committed. */
	CHECK_EQ(open_object(path, PEN_WRITE_IN_PLACE, 9000), 0);
	close_object();
	CHECK(!stat(path, &after));
	CHECK_EQ(after.st_size, 9000);
	CHECK_EQ(open_object(in_scratch("new"), PEN_WRITE_IN_PLACE, 10), 0);
	CHECK_EQ(pen_object_commit(object, &err), 0);
	close_object();
	CHECK(!access(in_scratch("new"), F_OK));
}

TEST(a_file_that_took_the_name_of_one_in_place_stays)
{
	const char *path = in_scratch("new");

	CHECK_EQ(open_object(path, PEN_WRITE_IN_PLACE, 100), 0);
	CHECK(!rename(make_file("finished", 500), path));
	close_object();
	CHECK_EQ(good_bytes(path), 500);
	CHECK_EQ(entries_in(scratch), 1);
}

TEST(commit_is_once_and_only_for_what_is_written)
{
	const char *path = make_file("old", 100);

	CHECK_EQ(open_object(path, PEN_READ, 0), 0);
	CHECK_EQ(pen_object_commit(object, &err), -EBADF);
	close_object();
	CHECK_EQ(open_object(path, PEN_WRITE, 100), 0);
	CHECK_EQ(pen_object_commit(object, NULL), 0);
	CHECK_EQ(pen_object_commit(object, &err), -EALREADY);
	CHECK(err.message[0]);
	close_object();
}

TEST(a_forked_child_does_not_commit_its_parents_file)
{
	const char *path = make_file("old", 500);
	int status = -1;
	pid_t child;

	for (int mode = PEN_WRITE; mode <= PEN_WRITE_IN_PLACE; mode++) {
		CHECK_EQ(open_object(path, mode, 100), 0);
		child = fork();
		if (!child) {
			CHECK_EQ(pen_object_commit(object, &err), -ECHILD);
			CHECK(strstr(err.message, "forked") && err.hint[0]);
			close_object();
			exit(0);
		}
		CHECK(child > 0 && waitpid(child, &status, 0) == child && !status);
		CHECK_EQ(good_bytes(path), 500);
		fill_object(100);
		CHECK_EQ(pen_object_commit(object, &err), 0);
		close_object();
		CHECK_EQ(good_bytes(path), mode == PEN_WRITE ? 100 : 500);
		path = make_file("old", 500);
	}
}

TEST(a_commit_that_fails_changes_nothing)
{
	static const char *const calls[] = { "fdatasync", "linkat", "rename", "fchmod", "fstat",
					     "lstat", "open", "flistxattr", "fgetxattr",
					     "fsync" };
	const char *path = make_file("old", 5000);

	CHECK(!chmod(path, 0640) && !setxattr(path, "user.of", "old", 3, 0));
	for (size_t i = 0; i < sizeof(calls) / sizeof(calls[0]); i++) {
		CHECK_EQ(open_object(path, PEN_WRITE, 100), 0);
		fill_object(100);
		failing = calls[i];
		sys_fault_hook = fail_named;
		CHECK_EQ(pen_object_commit(object, &err), -EIO);
		sys_fault_hook = NULL;
		CHECK(err.message[0] && !strcmp(err.object, path));
		CHECK_EQ(good_bytes(path), 5000);
		close_object();
		CHECK_EQ(good_bytes(path), 5000);
		CHECK_EQ(entries_in(scratch), 1);
	}
}

TEST(a_full_disk_shows_at_open_and_leaves_no_litter)
{
	const char *mount_point = in_scratch("small"), *path;

	if (geteuid())
		SKIP("only root can mount");
	CHECK(!mkdir(mount_point, 0755));
	if (mount("none", mount_point, "tmpfs", 0, "size=256k"))
		SKIP("a tmpfs cannot be mounted here");
	path = in_scratch("small/file");
	replace(path, 1000);
	CHECK_EQ(open_object(path, PEN_WRITE, 1 << 20), -ENOSPC);
	CHECK(err.hint[0] && !strcmp(err.object, path));
	CHECK_EQ(good_bytes(path), 1000);
	CHECK_EQ(entries_in(mount_point), 1);
	CHECK_EQ(open_object(in_scratch("small/new"), PEN_WRITE_IN_PLACE, 1 << 20), -ENOSPC);
	CHECK_EQ(entries_in(mount_point), 1);
	CHECK_EQ(open_object(path, PEN_WRITE_IN_PLACE, 1 << 20), -ENOSPC);
	CHECK_EQ(good_bytes(path), 1000);
	CHECK(!umount(mount_point));
}

TEST(a_file_system_mounted_read_only_is_refused)
{
	const char *mount_point = in_scratch("fixed");

	if (geteuid())
		SKIP("only root can mount");
	CHECK(!mkdir(mount_point, 0755));
	if (mount("none", mount_point, "tmpfs", MS_RDONLY, "size=64k"))
		SKIP("a tmpfs cannot be mounted here");
	CHECK_EQ(open_object(in_scratch("fixed/new"), PEN_WRITE, 10), -EROFS);
	CHECK(strstr(err.hint, "read-only"));
	CHECK(!umount(mount_point));
}

TEST(a_read_only_directory_is_refused)
{
	const char *path;

	make_file("old", 10);
	path = in_scratch("old");
	CHECK(!chmod(scratch, 0555));
	if (!geteuid() && seteuid(65534))
		SKIP("root may write everywhere, and cannot become someone else");
	CHECK_EQ(open_object(path, PEN_WRITE, 10), -EACCES);
	CHECK(err.hint[0]);
	CHECK_EQ(open_object(in_scratch("new"), PEN_WRITE_IN_PLACE, 10), -EACCES);
	CHECK(!getuid() ? !seteuid(0) : 1);
	CHECK(!chmod(scratch, 0755));
	CHECK_EQ(entries_in(scratch), 1);
}

TEST(anothers_file_in_a_sticky_directory_is_refused_at_open)
{
	const char *path = make_file("old", 10);

	if (geteuid())
		SKIP("only root can give files away");
	CHECK(!chown(path, 1234, 1234) && !chmod(path, 0666) && !chmod(scratch, 01777));
	CHECK(!seteuid(65534));
	CHECK_EQ(open_object(path, PEN_WRITE, 100), -EPERM);
	CHECK(strstr(err.message, "only owners") && strstr(err.hint, "in place"));
	CHECK_EQ(open_object(path, PEN_WRITE_IN_PLACE, 100), 0);
	close_object();
	CHECK_EQ(open_object(in_scratch("new"), PEN_WRITE, 100), 0);
	close_object();
	/* Its owner may, the directory's too, and who has the rights of all owners. */
	CHECK(!seteuid(0) && !seteuid(1234));
	replace(path, 100);
	CHECK(!seteuid(0) && !chown(scratch, 65534, 65534) && !seteuid(65534));
	replace(path, 200);
	CHECK(!seteuid(0) && !chown(path, 1234, 1234));
	replace(path, 300);
	CHECK_EQ(good_bytes(path), 300);
}

TEST(directories_pipes_and_absent_files_are_refused)
{
	const char *pipe_path = in_scratch("pipe");

	CHECK(!mkfifo(pipe_path, 0644));
	for (int mode = PEN_READ; mode <= PEN_WRITE_IN_PLACE; mode++) {
		CHECK_EQ(open_object(scratch, (enum pen_mode)mode, 0), -EISDIR);
		CHECK(!object && err.hint[0]);
		CHECK_EQ(open_object(pipe_path, (enum pen_mode)mode, 0), -ESPIPE);
		CHECK(!object && err.hint[0]);
		CHECK_EQ(open_object(in_scratch("no/where"), (enum pen_mode)mode, 0), -ENOENT);
		CHECK(err.hint[0]);
	}
	CHECK_EQ(open_object(in_scratch("none"), PEN_READ, 0), -ENOENT);
	CHECK_EQ(open_object(in_scratch("new/"), PEN_WRITE, 0), -EISDIR);
	CHECK_EQ(open_object("", PEN_READ, 0), -ENOENT);
	CHECK_EQ(open_object(pipe_path, (enum pen_mode)9, 0), -EINVAL);
	CHECK_EQ(entries_in(scratch), 1);
	pen_object_close(NULL);
}

/* Files of /proc are regular and of size 0, whatever they hold and however a read of them ends. */
TEST(files_that_do_not_tell_their_size_are_refused)
{
	static const char *const paths[] = { "/proc/self/mem", "/proc/self/status",
					     "/proc/self/pagemap" };

	if (access("/proc/self/mem", F_OK))
		SKIP("there is no /proc");
	for (size_t i = 0; i < sizeof(paths) / sizeof(paths[0]); i++) {
		CHECK_EQ(open_object(paths[i], PEN_READ, 0), -ESPIPE);
		CHECK(!object && err.hint[0]);
		CHECK(strstr(err.message, "does not tell how large it is"));
	}
	CHECK_EQ(open_object(make_file("empty", 0), PEN_READ, 0), 0);
	CHECK_EQ(pen_object_size(object), 0);
	close_object();
}

TEST(dev_null_is_written_in_place)
{
	CHECK_EQ(open_object("/dev/null", PEN_WRITE, 1000), 0);
	CHECK_EQ(object->info.offset_align, 0);
	CHECK_EQ(pen_object_commit(object, &err), 0);
	close_object();
	CHECK(!access("/dev/null", W_OK));
}

TEST(a_file_that_changes_is_not_the_one_that_was_opened)
{
	static const struct timespec other[2] = { { 1, 0 }, { 1, 0 } };
	const char *path = make_file("old", 5000);

	CHECK_EQ(open_object(path, PEN_READ, 0), 0);
	CHECK_EQ(object_unchanged(object, &err), 0);
	CHECK(!truncate(path, 6000));
	CHECK_EQ(object_unchanged(object, &err), -ESTALE);
	CHECK(strstr(err.message, "grew from 5000 to 6000") && err.hint[0]);
	CHECK(!truncate(path, 4000));
	CHECK_EQ(object_unchanged(object, &err), -ESTALE);
	CHECK(strstr(err.message, "shrank from 5000 to 4000"));
	close_object();
	CHECK_EQ(open_object(path, PEN_READ, 0), 0);
	CHECK(!utimensat(AT_FDCWD, path, other, 0));
	CHECK_EQ(object_unchanged(object, &err), -ESTALE);
	CHECK(strstr(err.message, "written to"));
	close_object();
	/* One that is replaced by rename is still the one that was opened. */
	CHECK_EQ(open_object(path, PEN_READ, 0), 0);
	CHECK(!rename(make_file("other", 10), path));
	CHECK_EQ(object_unchanged(object, &err), 0);
	close_object();
}

/* Any two moments that a file can be told apart at. */
static void let_time_pass(void)
{
	usleep(20000);
}

TEST(a_file_whose_time_was_set_back_is_not_the_one_that_was_opened)
{
	const char *path = make_file("old", 5000);
	struct timespec times[2];
	struct stat st;
	int fd;

	CHECK(!stat(path, &st));
	times[0] = st.st_atim;
	times[1] = st.st_mtim;
	let_time_pass();
	CHECK_EQ(open_object(path, PEN_READ, 0), 0);
	fd = open(path, O_WRONLY | O_CLOEXEC);
	CHECK(fd >= 0 && pwrite(fd, "other", 5, 100) == 5 && !futimens(fd, times));
	close(fd);
	CHECK_EQ(object_unchanged(object, &err), -ESTALE);
	CHECK(strstr(err.message, "written to") && err.hint[0]);
	/* Whatever else moves that time along with it. */
	CHECK(!link(path, in_scratch("second")));
	CHECK_EQ(object_unchanged(object, &err), 0);
	close_object();
}

static void give_second_name(const char *path)
{
	CHECK(!link(path, in_scratch("second")));
}

static void take_name_away(const char *path)
{
	CHECK(!unlink(path));
}

static void move_away(const char *path)
{
	CHECK(!rename(path, in_scratch("elsewhere")));
}

static void give_its_name_to_another(const char *path)
{
	CHECK(!rename(make_file("other", 10), path));
}

static void change_mode(const char *path)
{
	CHECK(!chmod(path, 0600));
}

static void change_owner(const char *path)
{
	CHECK(geteuid() || !chown(path, 1234, 2345));
}

/* What these do to the time of change must not stop a load. */
TEST(a_file_that_changes_its_names_or_its_rights_is_the_one_that_was_opened)
{
	static void (*const changes[])(const char *path) = {
		give_second_name, take_name_away, move_away, give_its_name_to_another, change_mode,
		change_owner,
	};

	for (size_t i = 0; i < sizeof(changes) / sizeof(changes[0]); i++) {
		char name[16];
		const char *path;

		snprintf(name, sizeof(name), "file%zu", i);
		path = make_file(name, 5000);
		let_time_pass();
		CHECK_EQ(open_object(path, PEN_READ, 0), 0);
		changes[i](path);
		CHECK_EQ(object_unchanged(object, &err), 0);
		close_object();
	}
}

TEST(residency_is_nothing_after_dropping_and_all_after_reading)
{
	const uint64_t size = (8 << 20) + 100;
	const char *path = make_file("file", size);
	static char bytes[1 << 20];
	uint64_t resident, pages, others;
	int fd;

	CHECK_EQ(open_object(path, PEN_READ, 0), 0);
	if (!object->info.has_residency)
		SKIP("this file system has no page cache to ask for");
	CHECK_EQ(object_uncache(object, &err), 0);
	CHECK_EQ(object_residency(object, 0, size, &resident, &err), 0);
	if (resident)
		SKIP("this file system does not drop its pages (tmpfs?)");
	/* 1 MiB in the middle, without read-ahead. */
	fd = open(path, O_RDONLY | O_CLOEXEC);
	CHECK(fd >= 0 && !posix_fadvise(fd, 0, 0, POSIX_FADV_RANDOM));
	CHECK_EQ(pread(fd, bytes, sizeof(bytes), 2 << 20), sizeof(bytes));
	CHECK_EQ(object_residency(object, 2 << 20, 1 << 20, &resident, &err), 0);
	CHECK_EQ(resident, 1 << 20);
	CHECK_EQ(object_residency(object, 4 << 20, 4 << 20, &resident, &err), 0);
	CHECK_EQ(resident, 0);
	if (!os_cachestat(object->fd, 0, size, &pages)) {
		CHECK_EQ(os_mincore(object->fd, 0, size, &others), 0);
		CHECK_EQ(pages, others);
		CHECK_EQ(os_cachestat(object->fd, (2 << 20) - 5000, 9000, &pages), 0);
		CHECK_EQ(os_mincore(object->fd, (2 << 20) - 5000, 9000, &others), 0);
		CHECK_EQ(pages, others);
		CHECK_TEXT(object_residency_method(object), "cachestat");
	}
	CHECK_EQ(good_bytes(path), size);
	CHECK_EQ(object_residency(object, 0, size, &resident, &err), 0);
	CHECK_EQ(resident, size);
	CHECK_EQ(object_uncache(object, &err), 0);
	CHECK_EQ(object_residency(object, 0, size, &resident, &err), 0);
	CHECK_EQ(resident, 0);
	close(fd);
	close_object();
}

TEST(an_old_kernel_is_asked_by_mincore)
{
	uint64_t resident;

	cachestat_error = ENOSYS;
	sys_fault_hook = fail_cachestat;
	CHECK_EQ(open_object(make_file("file", 10000), PEN_READ, 0), 0);
	sys_fault_hook = NULL;
	CHECK_TEXT(object_residency_method(object), "mincore");
	CHECK_EQ(object_residency(object, 0, 10000, &resident, &err), 0);
	CHECK_EQ(resident, 10000);
	close_object();
}

/* cachestat refuses them, and mincore would pretend that all is there. */
TEST(who_may_only_read_a_file_looks_at_a_few_places)
{
	const char *path = make_file("file", 8 << 20);
	uint64_t resident;

	cachestat_error = EPERM;
	sys_fault_hook = fail_cachestat;
	CHECK_EQ(open_object(path, PEN_READ, 0), 0);
	sys_fault_hook = NULL;
	CHECK_TEXT(object_residency_method(object), "samples");
	CHECK_EQ(good_bytes(path), 8 << 20);
	CHECK_EQ(object_residency(object, 0, 8 << 20, &resident, &err), 0);
	CHECK_EQ(resident, 8 << 20);
	CHECK_EQ(os_fdatasync(object->fd), 0);
	CHECK_EQ(object_uncache(object, &err), 0);
	CHECK_EQ(object_residency(object, 4 << 20, 4 << 20, &resident, &err), 0);
	if (resident == 4 << 20)
		SKIP("this file system does not drop its pages (tmpfs?)");
	CHECK_EQ(resident, 0);
	close_object();
}

/* The kernel fetches what a look misses; the next look must not find it. */
TEST(looking_at_a_few_places_leaves_the_cache_as_it_was)
{
	const uint64_t size = 64 << 20, hot = 8 << 20;
	const char *path = make_file("file", size);
	static char bytes[1 << 20];
	uint64_t resident, before, after;
	int fd;

	cachestat_error = EPERM;
	sys_fault_hook = fail_cachestat;
	CHECK_EQ(open_object(path, PEN_READ, 0), 0);
	sys_fault_hook = NULL;
	CHECK_TEXT(object_residency_method(object), "samples");
	CHECK_EQ(os_fdatasync(object->fd), 0);
	CHECK_EQ(object_uncache(object, &err), 0);
	/* The first part is there, without read-ahead. */
	fd = open(path, O_RDONLY | O_CLOEXEC);
	CHECK(fd >= 0 && !posix_fadvise(fd, 0, 0, POSIX_FADV_RANDOM));
	for (uint64_t at = 0; at < hot; at += sizeof(bytes))
		CHECK_EQ(pread(fd, bytes, sizeof(bytes), (off_t)at), sizeof(bytes));
	if (os_cachestat(fd, 0, size, &before) || before * os_page_size() != hot)
		SKIP("this kernel does not count cached pages, or this file system keeps them");
	for (int i = 0; i < 50; i++) {
		CHECK_EQ(object_residency(object, hot, size - hot, &resident, &err), 0);
		CHECK_EQ(resident, 0);
		CHECK_EQ(object_residency(object, 0, hot, &resident, &err), 0);
		CHECK_EQ(resident, hot);
	}
	CHECK_EQ(os_cachestat(fd, 0, size, &after), 0);
	/* One that the kernel is busy with at that moment may stay. */
	CHECK(after - before <= 8);
	close(fd);
	close_object();
}

TEST(too_many_open_files_are_told_with_the_limit)
{
	const char *path = make_file("file", 10);
	struct rlimit limit, tight;

	CHECK(!getrlimit(RLIMIT_NOFILE, &limit));
	tight = limit;
	tight.rlim_cur = 3;
	CHECK(!setrlimit(RLIMIT_NOFILE, &tight));
	CHECK_EQ(open_object(path, PEN_READ, 0), -EMFILE);
	CHECK(!setrlimit(RLIMIT_NOFILE, &limit));
	CHECK(strstr(err.hint, "which is 3 (ulimit -n)"));
}

static int note_name(const char *name, void *context)
{
	(void)name;
	*(bool *)context |= !standard_streams_are_closed();
	return 0;
}

/* Or a program that runs without them would print into its own data. */
TEST(no_file_takes_the_place_of_a_standard_stream)
{
	const char *path = make_file("old", 10000);
	bool taken = false;

	close_standard_streams();
	CHECK_EQ(open_object(path, PEN_READ, 0), 0);
	CHECK(standard_streams_are_closed());
	close_object();
	CHECK_EQ(open_object(path, PEN_WRITE, 20000), 0);
	fill_object(20000);
	CHECK(standard_streams_are_closed());
	CHECK_EQ(object_need_name(object, &err), 0);
	CHECK(standard_streams_are_closed());
	CHECK_EQ(pen_object_commit(object, &err), 0);
	CHECK(standard_streams_are_closed());
	close_object();
	CHECK_EQ(good_bytes(path), 20000);
	CHECK_EQ(os_list(AT_FDCWD, scratch, note_name, &taken), 0);
	CHECK(!taken);
	failing = "fcntl";
	sys_fault_hook = fail_named;
	CHECK_EQ(open_object(path, PEN_READ, 0), -EIO);
	CHECK(standard_streams_are_closed());
}

static int flush_error = EIO;

static int fail_directory_flush(const char *name)
{
	return !strcmp(name, "fsync") ? flush_error : 0;
}

TEST(a_commit_tried_again_leaves_no_litter)
{
	CHECK_EQ(open_object(in_scratch("out"), PEN_WRITE, 100), 0);
	sys_fault_hook = fail_directory_flush;
	CHECK_EQ(pen_object_commit(object, &err), -EIO);
	CHECK(strstr(err.hint, "power loss"));
	sys_fault_hook = NULL;
	CHECK_EQ(pen_object_commit(object, &err), 0);
	close_object();
	CHECK_EQ(entries_in(scratch), 1);
}

/* Of what a failed flush lost the kernel says nothing when it is asked again. */
TEST(a_flush_that_failed_is_not_tried_again)
{
	static const char *const calls[] = { "fdatasync", "fsync" };
	const char *path = make_file("old", 5000);

	for (size_t i = 0; i < 2; i++) {
		CHECK_EQ(open_object(path, PEN_WRITE, 100), 0);
		fill_object(100);
		failing = calls[i];
		sys_fault_hook = fail_named;
		CHECK_EQ(pen_object_commit(object, &err), -EIO);
		sys_fault_hook = NULL;
		CHECK_EQ(pen_object_commit(object, &err), -EIO);
		CHECK(strstr(err.hint, "anew") && !strcmp(err.object, path));
		close_object();
		CHECK_EQ(good_bytes(path), 5000);
		CHECK_EQ(entries_in(scratch), 1);
	}
	/* Nor after one that was made for the page cache's sake, or in place. */
	CHECK_EQ(open_object(path, PEN_WRITE, 100), 0);
	failing = "fdatasync";
	sys_fault_hook = fail_named;
	CHECK_EQ(object_uncache(object, &err), -EIO);
	sys_fault_hook = NULL;
	CHECK_EQ(pen_object_commit(object, &err), -EIO);
	close_object();
	CHECK_EQ(open_object(path, PEN_WRITE_IN_PLACE, 100), 0);
	sys_fault_hook = fail_named;
	CHECK_EQ(pen_object_commit(object, &err), -EIO);
	sys_fault_hook = NULL;
	CHECK_EQ(pen_object_commit(object, &err), -EIO);
	close_object();
}

/* Each of these has another hint where it happens before. */
TEST(whatever_the_last_step_fails_with_the_new_file_is_said_to_be_there)
{
	static const int errors[] = { ENOSPC, EDQUOT, EPERM, EACCES, ENOENT, EBUSY };

	for (size_t i = 0; i < sizeof(errors) / sizeof(errors[0]); i++) {
		for (int mode = PEN_WRITE; mode <= PEN_WRITE_IN_PLACE; mode++) {
			CHECK_EQ(open_object(in_scratch("out"), mode, 100), 0);
			fill_object(100);
			flush_error = errors[i];
			sys_fault_hook = fail_directory_flush;
			CHECK_EQ(pen_object_commit(object, &err), -errors[i]);
			sys_fault_hook = NULL;
			CHECK(strstr(err.hint, "The new file is in place"));
			close_object();
			CHECK_EQ(good_bytes(in_scratch("out")), 100);
			CHECK(!unlink(in_scratch("out")));
		}
	}
}

static int fail_direct(const char *name)
{
	return !strcmp(name, "reopen") ? EINVAL : 0;
}

TEST(a_store_without_direct_access_says_why)
{
	sys_fault_hook = fail_direct;
	CHECK_EQ(open_object(make_file("file", 10000), PEN_READ, 0), 0);
	sys_fault_hook = NULL;
	CHECK_EQ(object->direct_fd, -1);
	CHECK_EQ(object->info.offset_align, 0);
	CHECK(strstr(object->info.no_direct, "refuses O_DIRECT"));
	close_object();
}

TEST(direct_writes_keep_to_whole_pages)
{
	CHECK_EQ(open_object(in_scratch("new"), PEN_WRITE, 100), 0);
	if (!object->info.offset_align)
		SKIP("no O_DIRECT here");
	CHECK(object->info.offset_align >= 4096 && object->info.memory_align);
	close_object();
}

TEST_MAIN
