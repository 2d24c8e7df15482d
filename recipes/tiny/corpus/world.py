"""Tables of the small world that the conversations talk about. Data only."""

words = str.split

# country, capital, language, continent, currency
COUNTRIES = (
    ("France", "Paris", "French", "Europe", "the euro"),
    ("Spain", "Madrid", "Spanish", "Europe", "the euro"),
    ("Italy", "Rome", "Italian", "Europe", "the euro"),
    ("Germany", "Berlin", "German", "Europe", "the euro"),
    ("Portugal", "Lisbon", "Portuguese", "Europe", "the euro"),
    ("Greece", "Athens", "Greek", "Europe", "the euro"),
    ("Poland", "Warsaw", "Polish", "Europe", "the zloty"),
    ("Norway", "Oslo", "Norwegian", "Europe", "the krone"),
    ("Sweden", "Stockholm", "Swedish", "Europe", "the krona"),
    ("Finland", "Helsinki", "Finnish", "Europe", "the euro"),
    ("Hungary", "Budapest", "Hungarian", "Europe", "the forint"),
    ("Ireland", "Dublin", "English", "Europe", "the euro"),
    ("Japan", "Tokyo", "Japanese", "Asia", "the yen"),
    ("China", "Beijing", "Chinese", "Asia", "the yuan"),
    ("India", "New Delhi", "Hindi", "Asia", "the rupee"),
    ("Thailand", "Bangkok", "Thai", "Asia", "the baht"),
    ("Vietnam", "Hanoi", "Vietnamese", "Asia", "the dong"),
    ("Turkey", "Ankara", "Turkish", "Asia", "the lira"),
    ("Egypt", "Cairo", "Arabic", "Africa", "the pound"),
    ("Kenya", "Nairobi", "Swahili", "Africa", "the shilling"),
    ("Ghana", "Accra", "English", "Africa", "the cedi"),
    ("Morocco", "Rabat", "Arabic", "Africa", "the dirham"),
    ("Canada", "Ottawa", "English", "North America", "the dollar"),
    ("Mexico", "Mexico City", "Spanish", "North America", "the peso"),
    ("Cuba", "Havana", "Spanish", "North America", "the peso"),
    ("Peru", "Lima", "Spanish", "South America", "the sol"),
    ("Chile", "Santiago", "Spanish", "South America", "the peso"),
    ("Brazil", "Brasilia", "Portuguese", "South America", "the real"),
    ("Australia", "Canberra", "English", "Oceania", "the dollar"),
    ("New Zealand", "Wellington", "English", "Oceania", "the dollar"),
)

# animal, sound, number of legs, young, home
ANIMALS = (
    ("cat", "meow", 4, "kitten", "in houses and gardens"),
    ("dog", "woof", 4, "puppy", "with people"),
    ("cow", "moo", 4, "calf", "on farms"),
    ("sheep", "baa", 4, "lamb", "on grassy hills"),
    ("horse", "neigh", 4, "foal", "in fields and stables"),
    ("duck", "quack", 2, "duckling", "near ponds"),
    ("frog", "croak", 4, "tadpole", "near water"),
    ("lion", "roar", 4, "cub", "on the savannah"),
    ("owl", "hoot", 2, "owlet", "in the forest"),
    ("bee", "buzz", 6, "larva", "in a hive"),
    ("pig", "oink", 4, "piglet", "on farms"),
    ("hen", "cluck", 2, "chick", "in a coop"),
    ("wolf", "howl", 4, "pup", "in the forest"),
    ("goat", "bleat", 4, "kid", "on rocky hills"),
)

# planet, place from the sun, a remark
PLANETS = (
    ("Mercury", "first", "It is the smallest planet."),
    ("Venus", "second", "It is the hottest planet."),
    ("Earth", "third", "It is our home."),
    ("Mars", "fourth", "It is called the red planet."),
    ("Jupiter", "fifth", "It is the largest planet."),
    ("Saturn", "sixth", "It is known for its rings."),
    ("Uranus", "seventh", "It rolls on its side."),
    ("Neptune", "eighth", "It is the windiest planet."),
)

ELEMENTS = (
    ("hydrogen", "H", 1),
    ("helium", "He", 2),
    ("carbon", "C", 6),
    ("nitrogen", "N", 7),
    ("oxygen", "O", 8),
    ("sodium", "Na", 11),
    ("iron", "Fe", 26),
    ("copper", "Cu", 29),
    ("silver", "Ag", 47),
    ("gold", "Au", 79),
)

OPPOSITES = (
    ("hot", "cold"),
    ("big", "small"),
    ("fast", "slow"),
    ("light", "dark"),
    ("early", "late"),
    ("happy", "sad"),
    ("open", "closed"),
    ("full", "empty"),
    ("young", "old"),
    ("easy", "hard"),
    ("high", "low"),
    ("wet", "dry"),
    ("loud", "quiet"),
    ("strong", "weak"),
)

# English, French, Spanish, German
WORDS = (
    ("hello", "bonjour", "hola", "hallo"),
    ("thank you", "merci", "gracias", "danke"),
    ("cat", "chat", "gato", "Katze"),
    ("dog", "chien", "perro", "Hund"),
    ("house", "maison", "casa", "Haus"),
    ("water", "eau", "agua", "Wasser"),
    ("bread", "pain", "pan", "Brot"),
    ("sun", "soleil", "sol", "Sonne"),
    ("book", "livre", "libro", "Buch"),
    ("friend", "ami", "amigo", "Freund"),
    ("night", "nuit", "noche", "Nacht"),
    ("tree", "arbre", "arbol", "Baum"),
)

# what a list may hold, in the order that the assistant gives it
LISTS = {
    "fruits": words("apple banana cherry grape lemon mango orange peach pear plum"),
    "vegetables": words("carrot potato tomato onion cabbage pepper spinach pea leek celery"),
    "colors": words("red orange yellow green blue purple pink brown black white"),
    "animals": words("cat dog horse cow sheep lion tiger bear wolf rabbit"),
    "European countries": [row[0] for row in COUNTRIES if row[3] == "Europe"],
    "planets": [row[0] for row in PLANETS],
    "programming languages": words("Python C Java Rust Go JavaScript Ruby Haskell Swift Kotlin"),
    "musical instruments": words("piano guitar violin drums flute trumpet cello harp oboe banjo"),
    "sports": words("football tennis swimming running cycling rowing boxing judo golf hockey"),
    "kitchen tools": words("knife spoon fork whisk pan pot ladle grater peeler sieve"),
    "trees": words("oak pine birch maple willow cedar elm ash beech palm"),
    "drinks": words("water tea coffee milk juice cocoa lemonade cider soda broth"),
}

NAMES = words(
    "Ana Ben Carla David Elena Felix Grace Hugo Iris Jonas Karin Leo Mia Nils Olga Paul Rosa Sam "
    "Tara Umar Vera Will Yara Zoe Alice Bob Clara Dan Emma Finn Hana Ivan Julia Kofi Lina Max"
)

CITIES = words(
    "Paris Madrid Rome Berlin Lisbon Athens Oslo Dublin Tokyo Cairo Lima Havana Nairobi Sydney "
    "Boston Geneva Porto Kyoto Delhi Quito Turin Leeds Ghent Malmo"
)

THINGS = words(
    "apples books coins marbles stamps cards pencils shells stickers tickets cookies pears"
)

JOBS = words("teacher baker doctor painter pilot farmer nurse engineer writer chef")

HOBBIES = words("chess reading hiking cooking painting cycling music gardening dancing fishing")

WEEKDAYS = words("Monday Tuesday Wednesday Thursday Friday Saturday Sunday")

MONTHS = words(
    "January February March April May June July August September October November December"
)

MONTH_DAYS = (31, 28, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31)

NUMBER_WORDS = words("zero one two three four five six seven eight nine ten eleven twelve")
